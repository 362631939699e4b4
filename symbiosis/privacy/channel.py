"""A channel that sends masked rows only.

It stands between a client and its transport, so everything that a transport does with a call (waiting, reconnecting,
sending again) it does with masked rows: they are masked once, before it sees them.

What can be masked are products with a weight: forward and backward of linear layers. Anything else is refused here, and
never sent bare; a client's :class:`~symbiosis.client.virtlayer.Link` is told that it is private, so that modules which
an executor would serve whole run on the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

import torch

from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.share import Resident, Share
from symbiosis.core.transport import Channel, Check, Identity, Reply
from symbiosis.errors import ClientClosedError, PrivacyError
from symbiosis.modes import in_modes, modes_aside
from symbiosis.privacy.amplitude import size_of
from symbiosis.privacy.masks import Ask, Asked, Mask, Masked

__all__ = ["MaskedChannel"]

T = TypeVar("T")
Results = tuple[torch.Tensor, ...]

_IN_FP32 = {
    Pass.FORWARD: Pass.FORWARD_FP32,
    Pass.FORWARD_WITHOUT_BIAS: Pass.FORWARD_WITHOUT_BIAS_FP32,
    Pass.BACKWARD: Pass.BACKWARD_FP32,
}


class MaskedChannel:
    """A client's end, masked.

    Args:
        channels: to the executor, and to those that the scheme asks besides.
        begin: makes the scheme's mask for these channels.
        loop: the event loop that the channels live on; None for channels of synchronous code.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        begin: Callable[[Sequence[Channel], Ask], Mask],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._channels = tuple(channels)
        self._first = channels[0]
        self._loop = loop
        self._loop_thread = threading.get_ident() if loop is not None else None
        self.client = self._first.client
        self.device = self._first.device
        self.layers: Sequence[LayerSpec] = self._first.layers
        self._asked: dict[Key, tuple[Asked, torch.dtype]] = {}
        """How keys are asked with masked rows, and the dtype that the client wants back."""
        self._sent: dict[Call, tuple[Call, ...]] = {}
        self._helpers: ThreadPoolExecutor | None = None
        """Threads that wait for synchronous channels besides the one that calls."""
        self._lock = threading.Lock()
        self._waiting: set[_Waiter] = set()
        self.mask = begin(self._channels, self._ask)

    # ------------------------------------------------------------------------------------------------- what is masked

    def asked(self, key: Key) -> Asked:
        """How ``key`` is asked with masked rows.

        Raises:
            PrivacyError: it is no product with a weight.
            RequestError: the layer table has no such key.
        """
        return self._ask_for(key)[0]

    def _ask_for(self, key: Key) -> tuple[Asked, torch.dtype]:
        found = self._asked.get(key)
        if found is not None:
            return found
        (width, *more), dtype, results = expected(self.layers, key)
        specs = tuple([self.layers[layer] for layer in key.layers])
        if more or not all(spec.linear for spec in specs):
            raise PrivacyError(
                f"{specs[0].name} is served whole and is not linear, so its rows cannot be masked; they were not sent. "
                "Serve its linear layers (base_layers='linear' or 'mlp' at the executor)"
            )
        layers, pass_ = key
        narrow = dtype.itemsize < 4
        pass_ = _IN_FP32.get(pass_, pass_) if narrow else pass_
        bare = pass_
        if pass_.has_bias:
            bare = Pass.FORWARD_WITHOUT_BIAS_FP32 if pass_.in_fp32 else Pass.FORWARD_WITHOUT_BIAS
        asked = Asked(Key(layers, pass_), Key(layers, bare), specs, width, results, torch.float32 if narrow else dtype)
        return self._asked.setdefault(key, (asked, dtype))

    def _masked(self, call: Call) -> tuple[Masked, _Finish]:
        """A call's rows, masked, and how to finish when their results are there."""
        asked, dtype = self._ask_for(call.key)
        if in_modes():  # autocast and the like are the tenant's, and not for us
            with modes_aside(), torch.no_grad():
                return self._mask_rows(asked, dtype, call)
        grad = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return self._mask_rows(asked, dtype, call)
        finally:
            _set_grad_enabled(grad)

    def _mask_rows(self, asked: Asked, dtype: torch.dtype, call: Call) -> tuple[Masked, _Finish]:
        (x,) = call.tensors
        if x.dtype is not asked.dtype:
            x = x.to(asked.dtype)
        levels = self.mask.levels
        needed, finite = size_of(x, levels.least)
        lost = None
        if not finite:
            lost = ~(size_of_each(x) < _TOO_LARGE)
            x = x.masked_fill(lost[:, None], 0.0)
            needed, _ = size_of(x, levels.least)
        amplitude = levels.at(call.key, call.kind, x.shape[0], needed)
        masked = self.mask.mask(asked, x, amplitude, call.kind)
        return masked, _Finish(masked.unmask, dtype if dtype is not asked.dtype else None, lost)

    # ------------------------------------------------------------------------------------------------------ a channel

    def identity(self) -> Identity:
        return self._first.identity()

    def before_return(self, check: Check) -> None:
        self._first.before_return(check)

    @property
    def share(self) -> Share | Resident:
        return self._first.share

    def send(self, call: Call) -> Reply:
        masked, finish = self._masked(call)
        replies: list[Reply] = []
        self._sent[call] = masked.calls
        try:
            for channel, part in zip(self._channels, masked.calls, strict=True):
                replies.append(channel.send(part))
        except BaseException:
            self._cancel(call, replies)
            raise
        return _Answer(self, call, replies, masked.waits, finish)

    def call(self, call: Call) -> Results:
        masked, finish = self._masked(call)
        others = [
            self._background(channel, part) for channel, part in zip(self._channels[1:], masked.calls[1:], strict=True)
        ]
        try:
            answers = [self._first.call(masked.calls[0]), *map(self._wait, others)]
            for wait in masked.waits:
                self._wait(wait)
        except BaseException:
            if self._loop is not None:  # calls of synchronous channels end by themselves
                for channel, part in zip(self._channels[1:], masked.calls[1:], strict=True):
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(channel.cancel, part)
            raise
        return finish(answers)

    def flush(self) -> None:
        for channel in self._channels:
            channel.flush()

    def cancel(self, call: Call) -> None:
        for channel, part in zip(self._channels, self._sent.pop(call, ()), strict=False):
            channel.cancel(part)

    def interrupt(self, error: BaseException) -> None:
        for channel in self._channels:
            channel.interrupt(error)
        for waiter in list(self._waiting):
            waiter.end(error)

    def begin_pass(self) -> None:
        for channel in self._channels:
            channel.begin_pass()

    def end_pass(self) -> None:
        for channel in self._channels:
            channel.end_pass()

    def close(self) -> None:
        for waiter in list(self._waiting):
            waiter.end(ClientClosedError(f"the client {self.client!r} was closed"))
        for channel in self._channels:
            channel.close()
        self.mask.close()
        with self._lock:
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown(wait=True)

    # ---------------------------------------------------------------------------------------------------- ahead of time

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Have the scheme get ready for these keys, and wait until it is."""
        for wait in self._prepare(keys):
            if not wait.done():
                await _on_loop(wait)
            wait.result()

    def prepare_blocking(self, keys: Iterable[Key]) -> None:
        """The same for synchronous code."""
        for wait in self._prepare(keys):
            self._wait(wait)

    def _prepare(self, keys: Iterable[Key]) -> list[Future[Any]]:
        with torch.no_grad():
            waits = [self.mask.prepare(self.asked(key)) for key in keys]
        self.flush()
        return [wait for wait in waits if wait is not None]

    # ---------------------------------------------------------------------------------------------- calls of our own

    def _ask(self, call: Call) -> Future[Results]:
        return self._background(self._first, call)

    def _background(self, channel: Channel, call: Call) -> Future[Results]:
        """Send without waiting, from whatever thread."""
        if self._loop is None:
            with self._lock:
                if self._helpers is None:
                    self._helpers = ThreadPoolExecutor(len(self._channels), "symbiosis-mask")
                return self._helpers.submit(channel.call, call)
        answer: Future[Results] = Future()
        if threading.get_ident() == self._loop_thread:
            _send(channel, call, answer)
        else:
            try:
                self._loop.call_soon_threadsafe(_send, channel, call, answer)
            except RuntimeError as error:  # the loop is closed
                answer.set_exception(ClientClosedError(f"the event loop of client {self.client!r} is closed"))
                answer.exception().__cause__ = error  # type: ignore[union-attr]
        return answer

    def _wait(self, future: Future[T]) -> T:
        """Its result, on a thread that may block; ended by :meth:`interrupt`."""
        if not future.done():
            waiter = _Waiter()
            self._waiting.add(waiter)
            try:
                future.add_done_callback(waiter.done)
                waiter.event.wait()
            finally:
                self._waiting.discard(waiter)
            if waiter.error is not None and not future.done():
                raise waiter.error
        return future.result()

    def _cancel(self, call: Call, replies: Sequence[Reply]) -> None:
        """Give up on what was sent for a call."""
        for reply in replies:
            if isinstance(reply, asyncio.Future) and not reply.done():
                reply.add_done_callback(_seen)
            elif reply.done():
                _seen(cast("asyncio.Future[Any]", reply))
        self.cancel(call)


class _Finish:
    """From the answers to a masked call to what the client gets."""

    __slots__ = ("_dtype", "_lost", "_unmask")

    def __init__(
        self, unmask: Callable[[Sequence[Results]], Results], dtype: torch.dtype | None, lost: torch.Tensor | None
    ) -> None:
        self._unmask = unmask
        self._dtype = dtype
        self._lost = lost
        """[n], which rows were not finite: their results are not, either."""

    def __call__(self, answers: Sequence[Results]) -> Results:
        if in_modes():
            with modes_aside(), torch.no_grad():
                return self._finish(answers)
        grad = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return self._finish(answers)
        finally:
            _set_grad_enabled(grad)

    def _finish(self, answers: Sequence[Results]) -> Results:
        results = self._unmask(answers)
        if self._lost is not None:
            results = tuple([result.masked_fill(self._lost[:, None], math.nan) for result in results])
        return results if self._dtype is None else tuple([result.to(self._dtype) for result in results])


class _Answer:
    """The reply to a masked call: awaited, it waits for all that it takes, and unmasks. No callback, and so no turn of
    the event loop, between the executor's answer and the client."""

    def __init__(
        self,
        channel: MaskedChannel,
        call: Call,
        replies: Sequence[Reply],
        waits: Sequence[Future[Any]],
        finish: _Finish,
    ) -> None:
        self._channel = channel
        self._call = call
        self._replies = replies
        self._waits = waits
        self._finish = finish
        self._results: Results | None = None

    def done(self) -> bool:
        return all(reply.done() for reply in self._replies) and all(wait.done() for wait in self._waits)

    def result(self) -> Results:
        if self._results is None:
            try:
                answers = [reply.result() for reply in self._replies]
                for wait in self._waits:
                    wait.result()
            except BaseException:
                self._channel._cancel(self._call, self._replies)
                raise
            self._channel._sent.pop(self._call, None)
            self._results = self._finish(answers)
        return self._results

    def __await__(self) -> Generator[Any, None, Results]:
        try:
            for reply in self._replies:
                if not reply.done():
                    yield from reply.__await__()
            for wait in self._waits:
                if not wait.done():
                    yield from _on_loop(wait).__await__()
        except BaseException:
            self._channel._cancel(self._call, self._replies)
            raise
        return self.result()


class _Waiter:
    """A thread that waits for something other than a channel."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None

    def done(self, _: Future[Any]) -> None:
        self.event.set()

    def end(self, error: BaseException) -> None:
        self.error = error
        self.event.set()


_set_grad_enabled = torch._C._set_grad_enabled
_TOO_LARGE = 2.0**60
"""Root mean square of a row beyond which it counts as infinite."""


def size_of_each(x: torch.Tensor) -> torch.Tensor:
    """[n], the rms of each row."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms / math.sqrt(x.shape[1])


def _send(channel: Channel, call: Call, answer: Future[Results]) -> None:
    """On the loop: send, and have the answer put where it is waited for."""
    try:
        reply = channel.send(call)
    except Exception as error:  # noqa: BLE001 (whoever waits must get it)
        answer.set_exception(error)
        return
    assert isinstance(reply, asyncio.Future)
    if reply.done():
        _deliver(answer, reply)
    else:
        reply.add_done_callback(partial(_deliver, answer))


def _deliver(answer: Future[Results], reply: asyncio.Future[Results]) -> None:
    if reply.cancelled():
        answer.set_exception(ClientClosedError("the request was cancelled"))
    elif (error := reply.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(reply.result())


def _seen(reply: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; how it ends is no news."""
    if not reply.cancelled():
        reply.exception()


def _on_loop(future: Future[Any]) -> asyncio.Future[None]:
    """Done on the running loop when a future of any thread is. Cancelling it leaves that one alone."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def there() -> None:
        if not waiting.done():
            waiting.set_result(None)

    def done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(there)

    future.add_done_callback(done)
    return waiting
