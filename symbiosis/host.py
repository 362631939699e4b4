"""The public executor: hosts a base model in this process, and makes clients that run beside it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from symbiosis.client.joint import Here, check_mode, make_decoder
from symbiosis.client.trial import weights_read
from symbiosis.core.budget import LARGEST_PART, LEAST_BYTES, TABLES_BYTES, Budget
from symbiosis.core.faults import tell_unloaded
from symbiosis.core.policy import Policy
from symbiosis.core.privacy import Privacy, masked
from symbiosis.core.registry import make_policy, make_privacy, make_transport
from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import MAX_MODEL_NAME, is_model_name
from symbiosis.core.terms import JOINT, MAX_NAME, Kind, Terms, is_name
from symbiosis.core.transport import Channel, Listener
from symbiosis.errors import ExecutorClosedError, SymbiosisError, UsageError
from symbiosis.executor.allocator import return_freed
from symbiosis.executor.choosing import check_names
from symbiosis.executor.engine import Engine, now
from symbiosis.executor.launch import Launch
from symbiosis.executor.loaded import Loaded, settings
from symbiosis.executor.service import ExecutorService
from symbiosis.executor.shards import Shards, ignore_signals, work
from symbiosis.executor.sharing import Sharing
from symbiosis.executor.splitting import SplitModel
from symbiosis.executor.statistics import Statistics
from symbiosis.executor.timeline import Timeline
from symbiosis.modes import check_device
from symbiosis.transports.limits import Limits

if TYPE_CHECKING:
    from peft import PeftConfig

    from symbiosis.client.client import Client
    from symbiosis.client.joint.decoder import JointDecoder
    from symbiosis.client.waiting import ClientThread

log = logging.getLogger(__name__)

_numbers = itertools.count(1)
MAX_BYTES = 1 << 50
"""Largest value of ``max_bytes``, a pebibyte."""


class Executor:
    """Serves the base layers of one frozen model to any number of clients.

    Use it as an asynchronous context manager, on the event loop that the clients of this process run on.

    Args:
        model: any ``transformers`` model, or what :meth:`from_pretrained` has loaded. It is frozen, and put in
            evaluation mode, in place.
        policy: a batching policy: an object, or a name with options such as ``"opportunistic:wait_ms=20"``.
        base_layers: what is served: ``"linear"``, ``"mlp"``, or module names or patterns; see
            :class:`~symbiosis.executor.splitting.SplitModel`.
        device: where the base model runs; by default where it is.
        dtype: precision in which it is served; by default the model's. The model is converted by ``model.to(dtype)``,
            which rounds buffers such as rotary frequencies too; :meth:`from_pretrained` keeps those in fp32.
        max_rows: largest number of rows in a batch. Larger requests are served in slices. It bounds the memory inside
            base layers that are served whole.
        max_bytes: memory that clients in other processes may take here together, in bytes; at least 96 MiB. A call for
            which there is no room waits. One call with its results may take at most an eighth of the part that is
            counted. See docs/providers.md.
        joint: how clients of this process that decode are walked together: ``"exact"``, ``"fast"`` or ``"off"``;
            ``"auto"`` is ``"fast"``, which on a GPU captures walks as CUDA graphs. See docs/tenants.md.
        packed: whether weights on a CPU are packed, in place, so that products of few rows are faster: the last bit of
            a result may then differ from the model's own, and weights take twice the memory while a client trains. By
            default only if the executor loads the model itself. See docs/providers.md.
        allow_weights: names or patterns of base layers whose weights clients in other processes may have too, to train
            them in full (PEFT's ``modules_to_save``). Clients of this process always may, unless there are shards.
        layers: which of the base layers are served here: numbers of blocks, ranges of them, and names or patterns,
            separated by commas, such as ``"0-15,lm_head"``. Other executors serve the others; see docs/tenants.md. By
            default all of them.
        name: of the address ``inproc://name``; chosen freely by default.
        model_name: name of the model for clients in other processes, which their saved adapters state as their base
            model; by default its hub id, or the last part of the path of its folder. At most 256 characters.

    Attributes:
        service: the part that transports use.
        engine: the part that runs batches.

    Raises:
        SplitError: the model has no such base layers.
        PolicyError: the policy raised when it was told of the model.
        UnknownNameError: no policy has this name.
        UsageError: the policy does not take these options, or promises latencies that this machine cannot reach.
    """

    def __init__(
        self,
        model: nn.Module | Loaded,
        *,
        policy: str | Policy = "opportunistic",
        base_layers: str | Sequence[str] = "linear",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_rows: int = 8192,
        max_bytes: int = 8 << 30,
        joint: str = "auto",
        packed: bool = False,
        allow_weights: Sequence[str] = (),
        layers: str | None = None,
        name: str | None = None,
        model_name: str | None = None,
    ) -> None:
        _check(device, max_rows, max_bytes, joint, model_name)
        policy = make_policy(policy)
        loaded = model if isinstance(model, Loaded) else Loaded.given(model, device, dtype)
        split = SplitModel(
            *(loaded.model, base_layers),
            packed=packed,
            trial=weights_read,
            allow_weights=allow_weights,
            layers=layers,
            shard=None if loaded.launch is None else (0, loaded.launch.count),
            device=loaded.device,
            dtype=loaded.dtype,
        )
        self._shards = None if loaded.launch is None else Shards(split, loaded.launch)
        compute = None if self._shards is None else self._shards.run
        budget = Budget(_counted(max_bytes), return_freed)
        parts = split.row_parts()
        self.engine = Engine(split.layers, split.device, policy, max_rows, budget, parts, split.fraction, compute)
        walked = split.token_layers()
        self._token_s = self.engine.time_layers(walked) if walked else 0.0
        """Seconds that one token takes in the base layers of the idle executor; 0 where that is not known."""
        if walked:
            tell_unloaded(policy, self._token_s / split.fraction)
        address = f"inproc://{name or f'executor-{next(_numbers)}'}"
        self.service = ExecutorService(split, self.engine, budget, address, loaded.tokenizer, model_name)
        log.info("%s: %s", type(loaded.model).__name__, "; ".join(self.service.sharing.lines()))
        self._client_numbers = itertools.count(1)
        self._at_work: set[ClientThread] = set()
        """Threads of clients of this process that have work at the moment."""
        self._joint_mode = joint
        self._joint: JointDecoder | None = None
        self._closing: asyncio.Future[None] | None = None
        self._failure: SymbiosisError | None = None
        self._closed = asyncio.Event()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        model_class: type[Any] | None = None,
        policy: str | Policy = "opportunistic",
        base_layers: str | Sequence[str] = "linear",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_rows: int = 8192,
        max_bytes: int = 8 << 30,
        joint: str = "auto",
        packed: bool = True,
        allow_weights: Sequence[str] = (),
        layers: str | None = None,
        shards: int = 1,
        name: str | None = None,
        model_name: str | None = None,
        **options: Any,
    ) -> Executor:
        """Return an executor for a model folder or hub id.

        Args:
            model: folder or hub id.
            model_class: class to load it with; by default the architecture that its config names.
            dtype: precision to load it in; by default the checkpoint's.
            shards: processes that hold a part of each base layer, this one among them; see
                :mod:`symbiosis.executor.shards`. On CPUs each computes with its part of torch's threads, so this call
                lowers ``torch.get_num_threads()``; processes of ``torchrun`` keep their number of threads. On GPUs each
                has one of its own.
            **options: arguments of the class's ``from_pretrained`` (``revision``, ``attn_implementation``…).

        The other arguments are those of :class:`Executor`. Weights are packed by default.
        """
        _check(device, max_rows, max_bytes, joint, model_name)
        policy = make_policy(policy)
        named = (base_layers, layers, allow_weights) != ("linear", None, ())
        check = partial(check_names, base_layers=base_layers, layers=layers, allow_weights=allow_weights)
        loaded = Loaded.from_pretrained(
            *(model, model_class, device, dtype, options),
            check=check if named else None,
            partly=layers is not None,
            shards=shards,
        )
        try:
            return cls(
                loaded,
                policy=policy,
                base_layers=base_layers,
                max_rows=max_rows,
                max_bytes=max_bytes,
                joint=joint,
                packed=packed,
                allow_weights=allow_weights,
                layers=layers,
                name=name,
                model_name=model_name,
            )
        except BaseException:
            loaded.close()
            raise

    @staticmethod
    def run_shard(
        model: str | Path,
        *,
        shards: int,
        model_class: type[Any] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> None:
        """Be one of the further processes that ``torchrun`` has started, until the first one ends.

        Ctrl-C and SIGTERM are left to the first process. The arguments are those of :meth:`from_pretrained`, which the
        first process calls.

        Raises:
            UsageError: torchrun has not started this process, or has started another number.
        """
        launch = Launch(shards, settings(model, model_class, device, dtype, options))
        if not launch.rank:
            launch.close()
            raise UsageError(
                "torchrun has not started this process, or it is the first one; call Executor.from_pretrained here"
            )
        ignore_signals()
        work(launch.meet(), launch.settings)

    async def __aenter__(self) -> Executor:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Open for clients on the running event loop."""
        if self._shards is not None:
            loop = asyncio.get_running_loop()
            self._shards.lost = lambda error: loop.call_soon_threadsafe(self._lost, error)
        try:
            await self.service.start()
        except BaseException:
            if not self.service.listeners:  # it was not open before either
                await self.close()
            raise
        if self._shards is not None and self._shards.error is not None:
            self._lost(self._shards.error)

    async def listen(self, address: str, *, keep_weights: bool | None = None, **options: Any) -> Listener:
        """Open one more address, such as ``shm:///tmp/symbiosis.sock``.

        Args:
            address: the address.
            keep_weights: refuse to hand out weights that are not served, apart from embeddings, heads and small
                tensors; see :attr:`sharing`. By default for all but ``shm://`` and ``dist://``.
            **options: those of the address's transport.

        Raises:
            UnknownNameError: no transport has this scheme.
            UsageError: the transport has no such option, or the address cannot be opened.
            ShareError: the model cannot be served to other processes, or weights would leave the executor.
        """
        return await self.service.listen(address, keep_weights=keep_weights, **options)

    def limit(self, limits: Limits, max_bytes: int) -> None:
        """Change limits while clients are connected.

        Args:
            limits: limits of each client in another process that connects from now on, at every address. Clients that
                are connected keep their limits; the number of ``clients`` of a tenant applies at once.
            max_bytes: as for :class:`Executor`. It applies at once, and no client is disconnected because of it. If it
                is lowered, a call that no longer fits is refused after 60 s.

        Raises:
            UsageError: ``max_bytes`` is too small or too large.
        """
        _check_max_bytes(max_bytes)
        self.service.limit(limits, _counted(max_bytes))

    async def drain(self, within_s: float) -> bool:
        """Let walks of clients in other processes end, before :meth:`close`. These clients can join and begin walks no
        more.

        A client that would begin one is told that the executor closes: it moves to a replica or waits for the executor
        to return, as its ``retry`` says. Clients of this process go on as before.

        Args:
            within_s: longest time to wait, in seconds.

        Returns:
            Whether all walks of clients in other processes have ended.
        """
        return await self.service.drain(within_s)

    async def close(self) -> None:
        """Shut down. Every call that waits ends with :class:`~symbiosis.errors.ExecutorClosedError`.

        An executor that has begun to close goes on if the caller is cancelled, as long as the event loop runs.
        """
        closing = self._closing
        if closing is None or (closing.done() and (closing.cancelled() or closing.exception() is not None)):
            closing = self._closing = asyncio.ensure_future(self._close(ExecutorClosedError.of(self.service.address)))
        await asyncio.shield(closing)

    async def _close(self, error: SymbiosisError) -> None:
        async with contextlib.AsyncExitStack() as stack:  # runs what follows from the last to the first, also on errors
            stack.callback(self._closed.set)
            if self._shards is not None:
                stack.push_async_callback(asyncio.to_thread, self._shards.close)
            if self._joint is not None:
                stack.push_async_callback(self._joint.close, error)
            stack.push_async_callback(self.service.close, error)

    def _lost(self, error: SymbiosisError) -> None:
        """Close, because a shard has ended."""
        if self._closing is None:
            self._failure = error
            self._closing = asyncio.ensure_future(self._close(error))

    async def wait_closed(self) -> None:
        """Wait until the executor has closed.

        Raises:
            ShardLostError: it has closed because a process with a part of the model has ended.
        """
        await self._closed.wait()
        if self._failure is not None:
            raise self._failure

    async def _connect_joint(self) -> Channel:
        address = self.service.address
        return await make_transport(address).connect(address, JOINT)

    def __repr__(self) -> str:
        service, scheduler = self.service, self.engine.scheduler
        state = f"{len(service.clients)} clients, {scheduler.outstanding} requests" if service.is_open else "not open"
        return f"<Executor {service.address}: {len(self.layers)} base layers, {scheduler.policy}, {state}>"

    @property
    def layers(self) -> Sequence[LayerSpec]:
        """The layer table."""
        return self.service.layers

    @property
    def device(self) -> torch.device:
        """Device of the base model."""
        return self.service.device

    @property
    def sharing(self) -> Sharing:
        """How many bytes are served for all clients, how many each holds, and which weights are not served, and why."""
        return self.service.sharing

    def client(
        self,
        peft_config: PeftConfig | None = None,
        *,
        name: str | None = None,
        seed: int | None = None,
        device: str | torch.device | None = None,
        priority: int = 0,
        slo_ms: float | None = None,
        ttft_ms: float | None = None,
        kind: Kind | None = None,
        privacy: str | Privacy | None = None,
    ) -> Client:
        """Return a tenant's client in this process, to be opened with ``async with``. The first one imports PEFT, which
        takes a second; a program that serves others meanwhile may ``import peft`` before.

        Args:
            peft_config: any PEFT configuration; None for the bare model (an adapter can be loaded later).
            name: shown in statistics and errors; must differ from the names of other clients.
            seed: starts the client's stream of random numbers (adapter initialisation, dropout, sampling). By default
                the stream goes on from torch's own, which is then seeded with a number drawn from it: each client has
                other numbers, and `torch.manual_seed` before the first client opens determines all of them.
            device: where the client's part of the model runs; by default where the base model is.
            priority: for the policy ``priority``; clients of higher priority are served first.
            slo_ms: for the policy ``co-serving``: latency target for each generated token, in milliseconds, in place
                of the policy's own.
            ttft_ms: for the policy ``co-serving``: latency target for the first token, in milliseconds.
            kind: the kind of all requests of this client. By default it follows from the call: one token of a sequence
                whose earlier tokens are in a cache is decode, other rows are prefill, and rows with gradients or of a
                model in training mode are fine-tuning.
            privacy: how rows are masked before they leave the client: a scheme of :mod:`symbiosis.privacy`, or a name
                with options such as ``"noise-pool:size=64"``. By default they are not masked.

        Raises:
            UsageError: a latency target is invalid, or cannot be reached on this machine; the name is the executor's
                own, or is not 1 to 128 printable characters; the privacy scheme has no such option; or the executor
                serves a part of the model.
            UnknownNameError: no privacy scheme has this name.
            PrivacyError: an option of the privacy scheme has no valid value.
        """
        name = name or f"client-{next(self._client_numbers)}"
        if not is_name(name):
            raise UsageError(f"name is {name!r:.150}; give a text of 1 to {MAX_NAME} printable characters")
        if name == JOINT:
            raise UsageError(f"the name {name!r} is the executor's own; choose another one")
        try:
            terms = Terms(priority, slo_ms, ttft_ms, kind).check(self._token_s)
        except UsageError as error:
            raise UsageError(f"client {name!r}: {error}") from error
        scheme, service = make_privacy(privacy), self.service
        if service.elsewhere:
            raise UsageError(
                f"client {name!r}: this executor serves a part of the model; give symbiosis.connect all addresses"
            )

        async def connect(name: str) -> Channel:
            service.check_open()
            channel = await make_transport(service.address).connect(service.address, name, terms)
            return await masked(scheme, channel, service.address, terms, {})

        from symbiosis.client.client import Client  # imports PEFT, which a mere provider does not need

        if self._joint is None:
            engine = self.engine
            here = None
            if self._shards is None:
                here = Here(engine.runner.run_alone, lambda call: engine.submit(JOINT, call, Kind.DECODE))
            self._joint = make_decoder(self._joint_mode, self._connect_joint, engine.may_join, engine.walked, here)
        return Client(
            connect,
            peft_config,
            name=name,
            seed=seed,
            device=device,
            masked=scheme is not None,
            beside_others=lambda: self.engine.scheduler.beside_others(name),
            at_work=self._at_work,
            joint=lambda: self._joint,
            apart="a privacy scheme" if scheme is not None else "a kind of its own" if kind is not None else "",
        )

    def statistics(self) -> Statistics:
        """Return requests, batches, rows and waits so far, per layer and per client."""
        return self.engine.statistics()

    def status(self) -> dict[str, Any]:
        """Return what the executor is and does, as plain data."""
        return {**self.service.status(), "connections": self.service.budget.connections}

    def reset_statistics(self) -> None:
        """Count from zero, for instance after a warm-up."""
        self.engine.reset_counters()

    @contextlib.contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write what runs when to a file, while the block runs: batches, and each client's thinking, waiting, running.

        The file has Chrome's trace format; open it at https://ui.perfetto.dev.

        ::

            with executor.trace("batches.json"):
                await client.train_step(batch, optimizer)

        Raises:
            UsageError: the file cannot be written, or another trace is being written.
        """
        if self.engine.timeline is not None:
            raise UsageError("a trace of this executor is being written already; end that first")
        timeline = Timeline(file, [spec.name for spec in self.layers], now())
        self.engine.record(timeline)
        try:
            yield
        finally:
            self.engine.record(None)
            timeline.close()


def _check(device: str | torch.device | None, max_rows: Any, max_bytes: Any, joint: str, model_name: Any) -> None:
    """Raise UsageError for an argument of :class:`Executor` that can be checked before a model is loaded."""
    check_device(device)
    if type(max_rows) is not int:
        raise UsageError(f"max_rows is {max_rows!r}; give a whole number, 1 or more")
    _check_max_bytes(max_bytes)
    check_mode(joint)
    if model_name is not None and not is_model_name(model_name):
        raise UsageError(
            f"model_name is {model_name!r:.300}; give a text of at most {MAX_MODEL_NAME} printable characters"
        )


def _check_max_bytes(max_bytes: Any) -> None:
    if type(max_bytes) is not int or not LEAST_BYTES <= max_bytes <= MAX_BYTES:
        shown = "too large" if type(max_bytes) is int and max_bytes > MAX_BYTES else repr(max_bytes)
        raise UsageError(f"max_bytes is {shown}; give a whole number, {LEAST_BYTES} to {MAX_BYTES}")


def _counted(max_bytes: int) -> int:
    """Return the part of ``max_bytes`` that connections may take."""
    return (max_bytes - TABLES_BYTES) * LARGEST_PART // (LARGEST_PART + 1)
