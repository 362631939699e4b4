"""A client: one tenant's job, as a coroutine.

The client owns everything of the tenant: its part of the model, attention, KV cache, adapter, gradients, optimizer.
Only rows for base layers leave it. Forward passes and ``generate`` run in fibers on the event loop. Backward passes run
on a thread of the client's own, because autograd cannot be suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from symbiosis.client.adapters import add_adapter, load_adapter, save_adapter, vocabulary_of
from symbiosis.client.calls import enter
from symbiosis.client.fibers import RandomStream, current_fiber, run_in_fiber
from symbiosis.client.joint.decoder import JointDecoder, Seat
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import skeleton_for
from symbiosis.client.virtlayer import in_training_step, rehearse
from symbiosis.client.waiting import ClientThread, LoopWaiter
from symbiosis.core.privacy import Preparing
from symbiosis.core.transport import Channel
from symbiosis.errors import CannotWaitError, ClientClosedError, UsageError
from symbiosis.modes import modes_aside
from symbiosis.module_state import modes_kept
from symbiosis.training.step import NOTHING_TRAINS, Backward, Forward, drive, training_step

if TYPE_CHECKING:
    from peft import PeftConfig

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Channel)


class Client:
    """One tenant's job on a base model. Made by :meth:`symbiosis.Executor.client` and :meth:`symbiosis.Base.client`.

    Operations of one client run one after another, in the order in which they were awaited. Different clients run at
    the same time, each at its own rate.

    The model starts in evaluation mode, like a model from ``from_pretrained``. ``train_step`` puts it in training mode,
    ``generate`` puts it in evaluation mode for its own duration, and ``forward`` leaves the mode alone.

    Attributes:
        name: the client's name in statistics and errors.
        model: a ``PeftModel`` (or the bare model, without a PEFT configuration); its base layers are VirtLayers.
        closed: whether the client has left, or is leaving.
    """

    def __init__(
        self,
        connect: Callable[[str], Awaitable[Channel]],
        peft_config: PeftConfig | None = None,
        *,
        name: str,
        seed: int | None = None,
        device: str | torch.device | None = None,
        masked: bool = False,
        beside_others: Callable[[], bool] = lambda: False,
        at_work: set[ClientThread] | None = None,
        joint: Callable[[], JointDecoder | None] = lambda: None,
        apart: str = "",
    ) -> None:
        self.name = name
        self._connect = connect
        self._peft_config = peft_config
        self._seed = seed
        self._device = None if device is None else torch.empty(0, device=device).device  # with the number of the GPU
        self._model: Any = None
        self._connecting = False
        self._channel: Channel | None = None
        self._requester = Requester(masked=masked)
        self._thread = ClientThread(name, beside_others, set() if at_work is None else at_work)
        self._stream: RandomStream | None = None
        self._turn = asyncio.Lock()
        self._joint = joint
        self._apart = apart
        self._seat: Seat | None = None
        self._vocabulary: int | None = None
        """Number of tokens of the executor's model."""
        self.closed = False
        self._ending: asyncio.Future[None] | None = None
        self._loop_thread: int | None = None

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> Client:
        """Connect, build this client's part of the model and put the adapter on it."""
        opened_before = self.is_open or self.closed
        if opened_before:
            raise UsageError(f"client {self.name!r} was opened before; make a new one")
        self._connecting = True
        self._loop_thread = threading.get_ident()
        try:
            channel = await self._connect(self.name)
        finally:
            self._connecting = False
        if self.closed:  # meanwhile
            channel.close()
            if isinstance(channel, Preparing):
                await channel.wait_closed()
            raise self._closed_error()
        self._channel = channel
        try:
            self._requester.open(channel, LoopWaiter(self._thread))
            device = self._device or channel.device
            self._stream = RandomStream(device)
            if self._seed is None:
                self._stream.depart()
            else:
                self.manual_seed(self._seed)
            model = skeleton_for(channel, self._requester)
            self._vocabulary = vocabulary_of(model)
            apart = self._apart
            if device != channel.device:
                model, apart = model.to(device), apart or "another device"
            joint = self._joint()
            if joint is None:
                enter(model, self._requester.kinds)
            else:
                self._seat = joint.seat(self.name, model, self._requester.kinds, channel, apart)
            if self._peft_config is not None:
                model = await self._in_fiber(add_adapter, model, self._peft_config)
            self._model = model.eval()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Leave the executor. Operations in progress end with :class:`~symbiosis.errors.ClientClosedError`."""
        try:
            if not self.closed:
                self.closed = True
                self._requester.close()
                if self._seat is not None:
                    self._seat.leave(self._closed_error())
                if self._channel is not None:
                    self._channel.interrupt(self._closed_error())
                    self._channel.close()
        finally:
            with modes_aside():  # the caller's torch modes are its own, also while it waits
                if self._ending is None or self._ending.done():
                    self._ending = asyncio.ensure_future(self._end())
                await asyncio.shield(self._ending)  # it goes on if the caller is cancelled

    async def _end(self) -> None:
        async with self._having_turn():  # operations in progress have ended
            self._thread.close()
            if self._seat is not None:
                self._seat.give_back()
        if self._channel is not None and isinstance(self._channel, Preparing):
            await self._channel.wait_closed()

    @property
    def is_open(self) -> bool:
        """Whether the client was opened, or is being opened, and was not closed."""
        return not self.closed and (self._connecting or self._channel is not None)

    def _closed_error(self) -> ClientClosedError:
        return ClientClosedError(f"client {self.name!r} is closed; its model cannot be used any more")

    def _not_open(self) -> UsageError:
        return UsageError(f"client {self.name!r} is not open yet; use `async with executor.client(...) as client:`")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self._model is not None else "not open yet"
        return f"<Client {self.name!r}: {state}>"

    @property
    def model(self) -> Any:
        if self._model is None:
            raise self._not_open()
        return self._model

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run synchronous model code, such as a training loop's forward or a custom decoder, and return its result.

        It runs in a fiber: the function, and whatever it calls, may call this client's model. It must not call
        ``loss.backward()``, nor wait for a thread that calls the model: the thread waits for the event loop, which the
        function blocks. Run such code by ``asyncio.to_thread(fn)``.
        """
        async with self._having_turn():
            result = await self._in_fiber(fn, *args, **kwargs)
        if asyncio.iscoroutine(result):
            result.close()
            raise UsageError(f"{fn!r} is asynchronous; await it directly, run() is for synchronous model code")
        return result

    async def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: ``await client.forward(input_ids=ids, labels=ids)``. Returns the model's own output class."""
        return await self.run(self.model, *args, **kwargs)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``model.generate`` with all its options, in evaluation mode."""
        return await self.run(self._generate, *args, **kwargs)

    async def precompute(self, *, training: bool = True, **inputs: Any) -> None:
        """Compute masks ahead of time, if the client has a privacy scheme that can; otherwise do nothing.

        The model is walked once without gradients, and with zeros in place of the executor's answers, to see which
        layers are asked together.

        Args:
            training: also compute masks for backward passes.
            **inputs: arguments of the model for that walk; by default one token with id 0.
        """
        channel = self._open_channel()
        if not isinstance(channel, Preparing):
            return
        device = self._device or channel.device
        await channel.prepare(await self.run(rehearse, self.model, self._requester, training, inputs, device))

    async def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Call ``loss.backward(*args, **kwargs)`` on this client's thread."""
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss is {loss!r}, not a tensor; pass the model's own `out.loss`")
        if not loss.requires_grad and not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(NOTHING_TRAINS)
        async with self._having_turn():
            await self._in_walk_on_thread(partial(loss.backward, *args, **kwargs))

    async def train_step(
        self,
        batch: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        *,
        window: int | None = None,
        prune: bool | None = None,
    ) -> float:
        """Run forward, backward, ``optimizer.step()`` and ``zero_grad()`` on one batch, and return the loss.

        With a window, the sequence is run in parts of that many tokens: forward from left to right, and backward from
        right to left, with cached keys and values whose gradients are accumulated (FlexLLM, algorithm 2). The gradients
        are those of the whole sequence, up to the order of sums. The client then holds the activations of one window
        and the keys and values of all, and sends smaller requests. Each window except the last is run forward twice.

        A step that fails, or is cancelled, leaves no gradients, and parameters as they were unless the optimizer had
        begun. A step that is cancelled then is completed first.

        Args:
            batch: arguments of the model, with ``labels``; tensors are moved to the client's device.
            window: number of tokens in a window; None, or as many as there are, for the whole sequence at once.
            prune: keep fewer activations for backward and recompute exactly what follows from them: norms, SiLU·up,
                repeated keys (FlexLLM, section 5.2). Default: True with a window, otherwise False.

        Raises:
            UsageError: the model gave no loss, or nothing is trainable; or the model, its PEFT method or the batch
                cannot be run in windows.
        """
        if not isinstance(batch, Mapping) or not hasattr(optimizer, "step"):
            raise UsageError(
                f"train_step takes a batch (the model's arguments by name) and an optimizer, not "
                f"{type(batch).__name__} and {type(optimizer).__name__}"
            )
        async with self._having_turn():
            model = self.model
            device = self._device or self._open_channel().device
            inputs = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
            }
            if not model.training:
                model.train()
            try:
                with in_training_step(model):
                    loss = await drive(training_step(model, inputs, window, prune), self._run_operation)
                await self._on_thread(_step, optimizer)
            except BaseException:
                optimizer.zero_grad()  # gradients that would be added to those of the next step
                raise
            return loss

    def wrap_channel(self, wrap: Callable[[Channel], C]) -> C:
        """Send calls through a channel around the present one, such as a recorder of all that leaves this client. The
        client walks alone from now on."""
        self._open_channel()
        channel = self._requester.channel
        assert channel is not None
        if self._seat is not None:
            self._seat.leave(UsageError(f"client {self.name!r} is in the middle of an operation"))
        wrapped = wrap(channel)
        self._requester.open(wrapped)
        return wrapped

    def manual_seed(self, seed: int) -> None:
        """Restart this client's stream of random numbers, from which no other client draws."""
        if self._stream is None:
            raise UsageError(f"client {self.name!r} is not open yet; pass seed={seed} when you make it")
        self._stream.seed(seed)

    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Write a standard PEFT adapter folder, which plain PEFT loads too.

        Raises:
            UsageError: the client has no adapter, or it is called beside an operation of the client, such as an
                optimizer's step, and not by this operation itself.
        """
        self._check_idle("saving")
        save_adapter(self.model, folder, self._vocabulary)

    def load_adapter(self, folder: str | PathLike[str], *, name: str = "default", trainable: bool = False) -> None:
        """Load a PEFT adapter folder and make it the active adapter.

        Call it on the event loop while the client has no operation, or ``await client.run(client.load_adapter,
        folder)``, which waits for the client's operations. The event loop waits meanwhile.

        Args:
            folder: a folder that PEFT or :meth:`save_adapter` has written.
            name: PEFT's name for it; an adapter of this name and the same configuration is overwritten.
            trainable: whether it can be trained further.

        Raises:
            PlaceholderError: the method needs the weights of base layers.
            UsageError: the client has an adapter of this name with another configuration, or is in the middle of
                another operation; the adapter is not complete, or is of another model; or it is called on another
                thread than the event loop's, where an operation of the client could begin meanwhile.
        """
        model = self.model
        if not self._thread.is_current and threading.get_ident() != self._loop_thread:
            raise UsageError(
                f"client {self.name!r}: an adapter is not loaded on another thread, beside operations of the client; "
                "write `await client.run(client.load_adapter, folder)`"
            )
        self._check_idle("loading")
        self._model = load_adapter(model, folder, name, trainable, self._requester)

    def _check_idle(self, before: str) -> None:
        """Raise UsageError if the client is in the middle of an operation, unless the caller is this operation."""
        fiber = current_fiber()
        if self._thread.is_current or (fiber is not None and fiber.stream is self._stream):
            return
        if self._turn.locked():
            raise UsageError(
                f"client {self.name!r} is in the middle of an operation; await it before {before} an adapter"
            )

    @contextlib.asynccontextmanager
    async def _having_turn(self) -> AsyncIterator[None]:
        with modes_aside():  # the caller's torch modes are its own, also while it waits
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    def _open_channel(self) -> Channel:
        if self.closed:
            raise self._closed_error()
        if self._channel is None:
            raise self._not_open()
        return self._channel

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if not model.training:
            return model.generate(*args, **kwargs)
        with modes_kept(model):
            model.eval()
            return model.generate(*args, **kwargs)

    async def _run_operation(self, operation: Forward | Backward) -> Any:
        run = self._in_fiber if isinstance(operation, Forward) else self._in_walk_on_thread
        return await run(operation.run)

    async def _in_fiber(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if current_fiber() is not None:
            raise CannotWaitError("an operation of a client was started inside a fiber; await it in a coroutine")
        self._open_channel()
        channel = self._requester.channel  # perhaps one around the client's own, see wrap_channel
        assert channel is not None
        assert self._stream is not None
        channel.begin_walk()
        try:
            return await run_in_fiber(self._stream, channel, fn, *args, **kwargs)
        finally:
            if self._seat is not None:
                self._seat.rest()
            self._requester.forget()
            channel.end_walk()

    async def _in_walk_on_thread(self, fn: Callable[[], T]) -> T:
        channel = self._open_channel()
        channel.begin_walk()
        try:
            if any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
                # Checkpointed blocks run forward again, with dropout, so they need the generators to themselves.
                return await self._on_thread(self._thread.with_stream, self._stream, _without_engine_threads, fn)
            return await self._on_thread(_without_engine_threads, fn)
        finally:
            self._requester.forget()
            channel.end_walk()

    async def _on_thread(self, fn: Callable[..., T], *args: Any) -> T:
        return await self._thread.run(self._interrupt, fn, *args)

    def _interrupt(self, error: BaseException) -> None:
        if self._channel is not None:
            self._channel.interrupt(error)


def _without_engine_threads(fn: Callable[[], T]) -> T:
    # The engine has one thread per device for the process; a VirtLayer that waits there would block every client.
    with torch.autograd.set_multithreading_enabled(False):
        return fn()


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
