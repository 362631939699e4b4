"""The passes of a synchronous client, which has no coroutine that knows when they begin and end."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from symbiosis.core.transport import Channel

__all__ = ["Passes"]


class Passes:
    """Tells the executor when a client is in a pass, so that batches wait for it then and only then.

    Several threads may walk the model at once, forward and backward. The client is in a pass from the time at which the
    first of them begins until the last has ended.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._open = 0
        self._backwards: set[int] = set()
        """Backward passes in progress, by the number that the autograd engine gives them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return self  # a copy of the model uses the same connection

    def begin(self, *_: Any) -> None:
        """Note that a pass begins. Serves as a forward pre-hook."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._channel.begin_pass()

    def end(self, *_: Any) -> None:
        """Note that a pass has ended. Serves as a forward hook."""
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._channel.end_pass()

    def backward_begins(self) -> None:
        """Note that a request follows that may be the first of a backward pass."""
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._backwards:
            return
        with self._lock:
            if number in self._backwards:
                return
            self._backwards.add(number)
        self.begin()
        # The engine calls the callback when the backward pass is complete, and drops it also if the pass has failed.
        callback = _Callback()
        callback.ended = weakref.finalize(callback, self._backward_ended, number)
        callback.ended.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _backward_ended(self, number: int) -> None:
        with self._lock:
            self._backwards.remove(number)
        self.end()


class _Callback:
    ended: Any

    def __call__(self) -> None:
        self.ended()
