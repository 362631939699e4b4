"""A client: one tenant's job, as a coroutine.

It owns all that is the tenant's: its share of the model, attention, KV cache, adapter, gradients, optimizer. Only rows
for base layers leave it. Forward passes and ``generate`` run in fibers on the event loop; backward runs on a thread of
the client's own, because autograd cannot be suspended (:mod:`symbiosis.client.fibers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from symbiosis.client.adapters import add_adapter, load_adapter, save_adapter
from symbiosis.client.cores import use_cores
from symbiosis.client.fibers import RandomStream, current_fiber, run_in_fiber
from symbiosis.client.hollow import skeleton_for
from symbiosis.client.virtlayer import Link, on_thread, rehearse
from symbiosis.core.privacy import Preparing
from symbiosis.core.transport import Channel
from symbiosis.errors import CannotWaitError, ClientClosedError, UsageError
from symbiosis.modes import modes_aside
from symbiosis.training.pruning import pruned
from symbiosis.training.windows import WindowedStep, check_window, tokens

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["Client"]

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """One tenant's job on somebody else's base model. Made by :meth:`symbiosis.Executor.client`.

    Operations of one client run one after another, in the order in which they were awaited; different clients run at
    the same time, each at its own rate.

    The model starts in evaluation mode, as one from ``from_pretrained``. ``train_step`` puts it in training mode,
    ``generate`` in evaluation mode for its own duration; ``forward`` leaves the mode alone.

    Attributes:
        name: as given, or numbered.
        model: a ``PeftModel`` (or the bare model, without a PEFT configuration); its base layers are VirtLayers.
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
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self._crowded = crowded
        """Whether other clients' work goes on in this process."""
        self._connect = connect
        self._peft_config = peft_config
        self._seed = seed
        self._device = None if device is None else torch.device(device)
        self._model: Any = None
        self._channel: Channel | None = None
        self._link = Link()
        self._link.private = masked
        self._stream: RandomStream | None = None
        self._turn = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Client:
        """Connect, build this client's share of the model and put the adapter on it."""
        if self._channel is not None or self._closed:
            raise UsageError(f"client {self.name!r} was opened before; make a new one")
        self._channel = channel = await self._connect(self.name)
        try:
            self._link.channel = channel
            self._link.loop_thread = threading.get_ident()
            device = self._device or channel.device
            self._stream = RandomStream(device)
            if self._seed is not None:
                self.manual_seed(self._seed)
            model = skeleton_for(channel, self._link)
            if device != channel.device:
                model = model.to(device)
            if self._peft_config is not None:
                self._stream.enter()
                try:
                    model = add_adapter(model, self._peft_config, self._link)
                finally:
                    self._stream.leave()
            self._model = model.eval()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Leave the executor. Operations in progress end with :class:`~symbiosis.errors.ClientClosedError`."""
        if not self._closed:
            self._closed = True
            self._link.channel = None
            if self._channel is not None:
                self._channel.interrupt(self._closed_error())
                self._channel.close()
        async with self._having_turn():  # what was in progress has ended
            if self._thread is not None:
                self._thread.shutdown(wait=True)
                self._thread = None

    def _closed_error(self) -> ClientClosedError:
        return ClientClosedError(f"client {self.name!r} is closed; its model cannot be used any more")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._model is not None else "not open yet"
        return f"<Client {self.name!r}: {state}>"

    @property
    def model(self) -> Any:
        if self._model is None:
            raise UsageError(f"client {self.name!r} is not open yet; use `async with executor.client(...) as client:`")
        return self._model

    # ----------------------------------------------------------------------------------------------------- operations

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run synchronous model code of the tenant's own, such as a training loop's forward or a custom decoder.

        It runs in a fiber: whatever it calls may call this client's model. It must not call ``loss.backward()``.
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
        """``model.generate`` with all its options, in evaluation mode."""
        return await self.run(self._generate, *args, **kwargs)

    async def precompute(self, *, training: bool = True, **inputs: Any) -> None:
        """Have the client's privacy scheme compute ahead what it can; without one, nothing happens.

        The model is walked once without gradients, and with zeros in the place of the executor's answers, to see which
        layers are asked together.

        Args:
            training: for backward passes, too.
            **inputs: of the model, for that walk; by default one token with id 0.
        """
        channel = self._link_channel()
        if not isinstance(channel, Preparing):
            return
        device = self._device or channel.device
        await channel.prepare(await self.run(rehearse, self.model, self._link, training, inputs, device))

    async def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward(*args, **kwargs)``, on this client's thread."""
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss is {loss!r}, not a tensor; pass the model's own `out.loss`")
        async with self._having_turn():
            await self._in_pass_on_thread(loss.backward, *args, **kwargs)

    async def train_step(
        self,
        batch: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        *,
        window: int | None = None,
        prune: bool | None = None,
    ) -> float:
        """Forward, backward, ``optimizer.step()`` and ``zero_grad()`` on one batch; the loss.

        With a window, the sequence is run in parts of so many tokens, forward from left to right and backward from
        right to left, with cached keys and values whose gradients are accumulated (FlexLLM, algorithm 2). The
        gradients are those of the whole sequence, but for the order of sums. The client then holds the activations of
        one window and the keys and values of all, and sends smaller requests; it runs every window but the last
        forward twice.

        Args:
            batch: arguments of the model, with ``labels``; tensors are moved to the client's device.
            window: tokens in a window; None, or as many as there are, for the whole sequence at once.
            prune: keep fewer activations for backward and recompute, exactly, what follows from others: norms,
                SiLU·up, repeated keys (FlexLLM, section 5.2). By default where there is a window.

        A step that fails, or is cancelled, leaves parameters as they were and no gradients.

        Raises:
            UsageError: the model gave no loss; or the model, its PEFT method or the batch cannot be run in windows.
        """
        if not isinstance(batch, Mapping) or not hasattr(optimizer, "step"):
            raise UsageError(
                f"train_step takes a batch (the model's arguments by name) and an optimizer, not "
                f"{type(batch).__name__} and {type(optimizer).__name__}"
            )
        if window is not None:
            check_window(window)
        async with self._having_turn():
            model = self.model
            if not model.training:
                model.train()
            device = self._device or self._link_channel().device
            inputs = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
            }
            try:
                if window is not None and window < tokens(inputs):
                    prune = prune is None or prune
                    loss = await self._run_windows(WindowedStep(model, inputs, window, prune))
                else:
                    loss = await self._run_whole(inputs, prune=window is not None if prune is None else prune)
            except BaseException:
                optimizer.zero_grad()  # of a part of the batch; whoever tries again should not find them there
                raise
            await self._on_thread(_step, optimizer)
            return loss

    async def _run_whole(self, inputs: dict[str, Any], prune: bool) -> float:
        """Forward and backward of a batch; its loss."""
        output = await self._in_fiber(_pruned if prune else self.model, *([self.model] if prune else []), **inputs)
        loss: torch.Tensor | None = getattr(output, "loss", None)
        if loss is None:
            raise UsageError(f"the model gave no loss for a batch of {', '.join(inputs)}; does it have labels?")
        del output
        self._check_trainable(loss)
        await self._in_pass_on_thread(loss.backward)
        return loss.item()

    async def _run_windows(self, step: WindowedStep) -> float:
        """Forward and backward of a batch in windows; its loss."""
        total = 0.0
        for index in range(len(step) - 1):
            await self._in_fiber(step.look, index)
        for index in reversed(range(len(step))):
            loss = await self._in_fiber(step.loss, index)
            self._check_trainable(loss)
            await self._in_pass_on_thread(loss.backward)
            total += loss.item()
        tensors, gradients = step.rest()
        if tensors:
            await self._in_pass_on_thread(torch.autograd.backward, tensors, gradients)
        return total

    def _check_trainable(self, loss: torch.Tensor) -> None:
        if not loss.requires_grad:
            raise UsageError(
                f"nothing in the model of client {self.name!r} is trainable; give it a peft_config, or load its "
                "adapter with load_adapter(folder, trainable=True)"
            )

    def manual_seed(self, seed: int) -> None:
        """Restart this client's stream of random numbers, which no other client draws from."""
        if self._stream is None:
            raise UsageError(f"client {self.name!r} is not open yet; pass seed={seed} when you make it")
        self._stream.enter()
        try:
            torch.manual_seed(seed)
        finally:
            self._stream.leave()

    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Write a standard PEFT adapter folder, which plain PEFT loads too.

        Raises:
            UsageError: the client has no adapter.
        """
        save_adapter(self.model, folder)

    def load_adapter(self, folder: str | PathLike[str], *, name: str = "default", trainable: bool = False) -> None:
        """Load a PEFT adapter folder and make it the active adapter.

        Args:
            name: under which PEFT knows it; an adapter of this name and the same configuration is overwritten.
            trainable: whether it is to be trained further.
        """
        if self._turn.locked():
            raise UsageError(
                f"client {self.name!r} is in the middle of an operation; await it before loading an adapter"
            )
        self._model = load_adapter(self.model, folder, name, trainable, self._link)

    # ---------------------------------------------------------------------------------------------------------- parts

    @contextlib.asynccontextmanager
    async def _having_turn(self) -> AsyncIterator[None]:
        with modes_aside():  # the caller's modes are its own while it waits, too
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    def _link_channel(self) -> Channel:
        if self._link.channel is None:
            raise self._closed_error()
        return self._link.channel

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        training = model.training
        if training:
            model.eval()
        try:
            return model.generate(*args, **kwargs)
        finally:
            if training:
                model.train()

    async def _in_fiber(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if current_fiber() is not None:
            raise CannotWaitError("an operation of a client was started inside a fiber; await it in a coroutine")
        channel = self._link_channel()
        assert self._stream is not None
        channel.begin_pass()
        try:
            return await run_in_fiber(self._stream, channel, fn, *args, **kwargs)
        finally:
            self._link.forget()
            channel.end_pass()

    async def _in_pass_on_thread(self, fn: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        channel = self._link_channel()
        channel.begin_pass()
        try:
            if any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
                await self._on_thread(self._recompute, fn, args, kwargs)
            else:
                await self._on_thread(_without_engine_threads, fn, args, kwargs)
        finally:
            self._link.forget()
            channel.end_pass()

    def _recompute(self, fn: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Checkpointed blocks run forward again, dropout and all: they need the generators to themselves while they do.
        stream = self._stream
        assert stream is not None
        stream.enter()
        self._link.stream_on_thread = stream
        try:
            _without_engine_threads(fn, args, kwargs)
        finally:
            self._link.stream_on_thread = None
            stream.leave()

    async def _on_thread(self, fn: Callable[..., T], *args: Any) -> T:
        """Run on this client's thread. When cancelled, ends only after the thread is free again."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"symbiosis-{self.name}", initializer=self._on_thread_start)
        with modes_aside():
            loop = asyncio.get_running_loop()
            return await self._end_of(loop.run_in_executor(self._thread, self._with_cores, self._crowded(), fn, args))

    def _on_thread_start(self) -> None:
        on_thread.link = self._link
        on_thread.cores = torch.get_num_threads()

    def _with_cores(self, crowded: bool, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Leave some to the event loop, where the others' work is done. If both had threads for all cores, an operator
        there would wait until the scheduler has given each of its threads a turn: with a few percent of fine-tuning
        beside it, decoding took three times as long (`bench coserve`, two cores)."""
        use_cores(max(1, on_thread.cores // 2) if crowded else on_thread.cores)
        return fn(*args)

    async def _end_of(self, work: asyncio.Future[T]) -> T:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            error = ClientClosedError(f"this operation of client {self.name!r} was cancelled")
            self._link.interrupted = error
            if self._channel is not None:
                self._channel.interrupt(error)
            while not work.done():
                try:
                    await asyncio.wait([work])
                except asyncio.CancelledError:
                    continue
            work.exception()  # what the interruption caused is not news
            raise
        finally:
            self._link.interrupted = None


def _without_engine_threads(fn: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The engine has one thread a device for the whole process; a VirtLayer that waits there would block every client.
    with torch.autograd.set_multithreading_enabled(False):
        fn(*args, **kwargs)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _pruned(model: Any, **inputs: Any) -> Any:
    with pruned():
        return model(**inputs)
