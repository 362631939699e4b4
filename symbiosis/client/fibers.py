"""Fibers: synchronous model code that suspends on the event loop.

``transformers`` calls its layers synchronously, and clients are coroutines. A fiber is a greenlet in which such code
runs on the event loop's thread. When a VirtLayer must wait, the fiber hands its awaitable to the coroutine that drives
it, and is resumed with the result. Meanwhile the event loop runs other fibers.

Fibers share a thread, so everything that torch keeps per thread must follow the fiber that runs:

* modes of grad, inference and autocast, function and dispatch modes, and saved-tensor hooks (gradient checkpointing
  enters them around whole blocks) are put aside while a fiber is suspended. The event loop sees torch's defaults;
* a fiber draws random numbers from its client's :class:`RandomStream`, so sampling and dropout give the same numbers as
  in a process of the client's own. Torch's generators hold the stream meanwhile, also for other threads: what a
  trainer on a thread draws, and its seeds, are not kept apart from the streams of clients.

The autograd engine keeps C++ state per thread that cannot be put aside, so a fiber must not suspend inside it:
``backward`` runs on a thread of the client's own (:mod:`symbiosis.client.client`).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import numpy
import torch
from greenlet import getcurrent, greenlet

from symbiosis.core.transport import Channel
from symbiosis.modes import Modes, in_modes

P = ParamSpec("P")
T = TypeVar("T")


class RandomStream:
    """One client's random numbers, as if its job had a process of its own. Starts as a copy of torch's generators.
    :meth:`depart` makes their numbers differ from now on.

    Entering and leaving copy the state of torch's CPU generator, 5 kB, which takes a microsecond. One stream is entered
    at a time in the whole process; a thread that enters waits until the thread before it has left.
    """

    __slots__ = ("_cuda", "_mine", "_others")

    def __init__(self, device: torch.device) -> None:
        self._cuda: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._cuda = torch.cuda.default_generators[index]
        with _entered:  # otherwise it might copy the stream of a client that draws on another thread
            self._mine = self._read()
        self._others: tuple[torch.Tensor, torch.Tensor | None] | None = None  # None while torch draws from others

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _cpu.get_state(), None if self._cuda is None else self._cuda.get_state()

    def _write(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        _cpu.set_state(state[0])
        if self._cuda is not None and state[1] is not None:
            self._cuda.set_state(state[1])

    def enter(self) -> None:
        """Have torch draw from this stream from now on."""
        _entered.acquire()
        self._others = self._read()
        self._write(self._mine)

    def leave(self) -> None:
        """Restore the stream that :meth:`enter` found."""
        others, self._others = self._others, None
        assert others is not None
        self._mine = self._read()
        self._write(others)
        _entered.release()

    def seed(self, seed: int) -> None:
        """Restart this stream, also while torch draws from it."""
        with _entered, self if self._others is None else contextlib.nullcontext():
            torch.manual_seed(seed)

    def depart(self) -> None:
        """Seed torch's own generators with a number drawn from them, so that the next stream does not repeat this one.
        After the draw alone, it would have the same numbers, one place apart."""
        with _entered:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_cpu))
            _cpu.manual_seed(seed)
            if self._cuda is not None:
                self._cuda.manual_seed(seed)

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()


@contextlib.contextmanager
def numpys_stream(seed: int | None = None) -> Iterator[None]:
    """Keep the state of numpy's random numbers, and seed them meanwhile if a seed is given. Speech models mask frames
    with them in training. All clients of a process share them."""
    state = numpy.random.get_state()
    if seed is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        numpy.random.set_state(state)


_cpu = torch.default_generator
_entered = threading.RLock()  # reentrant: one that is collected enters inside another's


class Fiber(greenlet):  # type: ignore[misc]  # greenlet is not typed
    """A greenlet that may suspend on the event loop."""

    stream: RandomStream
    observer: Channel
    """The channel of the client whose walk this is."""

    def wait(self, awaitable: Awaitable[T], channel: Channel | None = None) -> T:
        """Suspend this fiber until ``awaitable`` is done, and return its result or raise its exception.

        The fiber must be the running one. ``channel`` is the channel that the fiber waits for. If it belongs to another
        client, this client does not count as thinking meanwhile; otherwise batches would wait for both clients.
        """
        self.stream.leave()
        elsewhere = channel is not None and channel is not self.observer
        if elsewhere:
            self.observer.end_walk()
        grad = torch.is_grad_enabled()
        modes = Modes() if in_modes() else None
        torch._C._set_grad_enabled(True)
        driver = self.parent
        assert driver is not None
        try:
            return cast(T, driver.switch(awaitable).pop())
        finally:
            if modes is not None:
                modes.restore()
            torch._C._set_grad_enabled(grad)
            self.stream.enter()
            if elsewhere:
                self.observer.begin_walk()  # last, because it raises if this client was closed meanwhile


def current_fiber() -> Fiber | None:
    """Return the fiber that this code runs in, or None."""
    current = getcurrent()
    return current if isinstance(current, Fiber) else None


async def run_in_fiber(
    stream: RandomStream, observer: Channel, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a synchronous function in a fiber and return its result. ``observer`` is flushed whenever the fiber suspends.

    The function starts in the torch modes of the caller, and must restore them before it returns. Cancelling the
    awaiting task raises ``CancelledError`` in the function, where it waits.
    """
    fiber = _made(stream, observer)
    return cast(T, await _driven(fiber, fiber.switch(stream, fn, args, kwargs)))


async def run_apart(
    stream: RandomStream, observer: Channel, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Do what :func:`run_in_fiber` does, for work that no caller waits for: the function starts in torch's defaults,
    whatever modes a coroutine holds that waits for something else."""
    fiber = _made(stream, observer)
    return cast(T, await _driven(fiber, _continued(fiber, fiber.switch, stream, fn, args, kwargs)))


def _made(stream: RandomStream, observer: Channel) -> Fiber:
    fiber = Fiber(_entry)
    fiber.stream = stream
    fiber.observer = observer
    fiber.gr_context = contextvars.copy_context()
    return fiber


async def _driven(fiber: Fiber, out: Any) -> Any:
    """Drive a fiber that has started, and return its result."""
    while not fiber.dead:
        # The fiber takes the result out of this list, so that no variable here keeps a tenant's rows alive.
        try:
            fiber.observer.flush()
            result = [await out]
        except BaseException as error:  # noqa: BLE001 (the fiber must see the error)
            out = _continued(fiber, fiber.throw, error)
        else:
            out = _continued(fiber, fiber.switch, result)
    return out


def _continued(fiber: Fiber, switch: Callable[..., Any], *arguments: Any) -> Any:
    """Let a fiber run on, in its own torch modes alone. A coroutine may hold others while it waits for something else;
    they stay on the thread afterwards, unless the fiber has ended and its caller has modes of its own."""
    if not in_modes():
        return switch(*arguments)
    others = Modes()
    try:
        return switch(*arguments)
    finally:
        if not (fiber.dead and in_modes()):
            others.restore()


def _entry(stream: RandomStream, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    with stream:
        return fn(*args, **kwargs)
