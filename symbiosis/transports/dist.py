"""``dist://host:port``: tensors by ``torch.distributed``, point to point: NCCL between GPUs, gloo between CPUs.

All but the tensors is as over ``tcp://``: ZeroMQ carries the messages, CURVE keys say which tenant one comes from, the
limits are the same. The tensors travel by :mod:`symbiosis.transports.lanes`: of a CALL after its message, of a RESULT
too.

torch.distributed encrypts nothing and does not ask who it talks to, so a listener must be told ``insecure=True``, keys
or not, and so must a client whose executor is on another host. A tenant who answers gloo with the wrong bytes ends the
process it runs in: the executor has it in processes of their own, two a client (:mod:`~symbiosis.transports
.lane_process`), and it is that client's connection that ends. NCCL is in the executor's own process.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Service, Session
from symbiosis.errors import (
    BrokenError,
    BusyError,
    ClientClosedError,
    RefusedError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.transports import wire
from symbiosis.transports.chunks import Progress, bar_unless
from symbiosis.transports.keys import Keyring
from symbiosis.transports.lane_process import LaneProcesses
from symbiosis.transports.lanes import Lanes
from symbiosis.transports.rendezvous import BACKENDS, EXECUTOR, TENANT, Note
from symbiosis.transports.sockets import Endpoint, Frames, local_ip
from symbiosis.transports.tcp import TcpListener, TcpTransport
from symbiosis.transports.tcp_client import Pending, TcpChannel
from symbiosis.transports.tcp_connection import Connection, Message
from symbiosis.transports.tcp_peer import Link, TcpPeer
from symbiosis.transports.threads import LoopThread, ThreadedChannel
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import CallMessage, Hello, Limits, Type

__all__ = ["DistChannel", "DistPeer", "DistTransport"]

MAX_FAILURES = 5


class DistPeer(TcpPeer):
    """The executor's side of one connection."""

    _listener: DistListener

    def __init__(self, listener: DistListener, identity: bytes, link: Link, user: str | None, tenant: str) -> None:
        super().__init__(listener, identity, link, user, tenant)
        self._backend = listener.backend
        self._lanes: Lanes | None = None
        self._arriving: dict[int, bool] = {}
        """Calls whose tensors are on their way, by id: whether they were cancelled."""

    def welcome(self, session: bool) -> dict[str, Any]:
        return {**super().welcome(session), "backend": self._backend}

    def received(self, data: bytes | memoryview) -> None:
        try:
            super().received(data)
        except BusyError as error:
            self.refuse(error)

    def _control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is Type.RENDEZVOUS and self.session is not None:
            self._open().met(Note(*wire.read_rendezvous(content)))
        else:
            super()._control(type_, content)

    def _open(self) -> Lanes:
        if self._lanes is None:
            # NCCL's may outlast their session: they count as well.
            listener = self._listener
            waiting = listener.lanes[self.tenant]
            waiting[:] = [lanes for lanes in waiting if lanes.alive]
            if len(waiting) >= self._limits.clients:
                raise BusyError(
                    f"{self.tenant} has {len(waiting)} connections whose lanes are not closed yet; try later"
                )
            try:
                ends = local_ip(self.link.descriptor), self.link.remote[0]
            except OSError as error:
                raise WireError("its connection has ended") from error
            memory = 2 * self._limits.arena_bytes
            try:
                self._lanes = Lanes(
                    self._backend, EXECUTOR, self._device, *ends, self._tell, self._broken, listener.processes, memory
                )
            except (OSError, BrokenError) as error:
                raise BusyError(f"the executor cannot open lanes for {self.tenant}: {error}; try later") from error
            waiting.append(self._lanes)
        return self._lanes

    @property
    def _device(self) -> torch.device:
        return self._service.device if self._backend == "nccl" else torch.device("cpu")

    def _tell(self, note: Note) -> None:
        self.send(wire.pack(Type.RENDEZVOUS, *note))

    def _broken(self, error: SymbiosisError) -> None:
        self._drop(str(error))

    def _call(self, session: Session, message: CallMessage) -> None:
        if self._frames:
            raise WireError("over dist:// a CALL brings no frames")
        if message.id in self._calls or message.id in self._arriving:
            raise WireError(f"call {message.id} is outstanding already")
        try:
            widths, dtype, _ = session.expects(message.key)
        except SymbiosisError as error:
            raise WireError(str(error)) from error  # what comes next on the lane nobody could tell
        size = message.rows * sum(widths) * dtype.itemsize
        if not size:
            raise WireError("a CALL has 1 row at least")
        if self._held_bytes + size > self._limits.arena_bytes:
            raise self._too_much(self._held_bytes + size)
        lanes = self._open()
        try:
            tensors = tuple([lanes.empty(message.rows, width, dtype) for width in widths])
        except BrokenError as error:
            raise WireError(str(error)) from error
        self._arriving[message.id] = False
        self._sizes[message.id] = size
        self._held_bytes += size
        self._rows += message.rows
        self._pause_if_full()
        lanes.receive(tensors, partial(self._arrived, message, tensors))

    def _arrived(self, message: CallMessage, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._gone or self.session is None:
            return
        cancelled = self._arriving.pop(message.id)
        self._rows -= message.rows
        if cancelled:
            self.send(wire.pack_error(message.id, ClientClosedError("the call was cancelled")))
        else:
            device = self._service.device
            self._submit(self.session, message, tuple([tensor.to(device) for tensor in tensors]))
        if message.id not in self._calls:  # answered already
            self._held_bytes -= self._sizes.pop(message.id, 0)
        self._pause_if_full()

    def _outstanding(self) -> int:
        return len(self._calls) + len(self._arriving)

    def _cancel(self, id_: int) -> None:
        if id_ in self._arriving:
            self._arriving[id_] = True
        else:
            super()._cancel(id_)

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        lanes = self._lanes
        if self._gone or lanes is None:
            return
        size = sum(result.nbytes for result in results)
        self._unsent_bytes += size
        self._send([wire.pack(Type.RESULT, message.id)])
        if self._lanes is not lanes:  # that found out that the client is gone
            return
        sent = partial(self._sent, size)
        try:
            lanes.send([result.to(self._device).contiguous() for result in results], sent)
        except BrokenError as error:
            self._broken(error)

    def _sent(self, size: int) -> None:
        self._unsent_bytes -= size

    def gone(self, why: str) -> None:
        super().gone(why)
        self._arriving.clear()
        if self._lanes is not None:
            self._lanes.close()
            if not self._lanes.alive:
                self._listener.lanes[self.tenant].remove(self._lanes)
            self._lanes = None


class DistListener(TcpListener):
    """A bound port, the clients that came through it, and what their lanes run in."""

    _peer = DistPeer
    _encrypts = False
    processes: LaneProcesses | None = None
    """Where gloo's lanes run."""
    _taken = False

    def __init__(
        self, endpoint: Endpoint, service: Service, limits: Limits, keys: Keyring | None, backend: str
    ) -> None:
        super().__init__(endpoint, service, limits, keys)
        self.backend = backend
        self.lanes: defaultdict[str, list[Lanes]] = defaultdict(list)
        """By tenant."""

    def open(self, address: str) -> None:
        super().open(address)
        if self.backend == "gloo":
            self.processes = LaneProcesses.take()
            self._taken = True

    async def close(self) -> None:
        await super().close()
        taken, self._taken = self._taken, False
        if taken and self.processes is not None:
            await asyncio.to_thread(self.processes.close)


class DistChannel(TcpChannel):
    """The client's side."""

    _lanes: Lanes | None = None
    _failures = 0
    """Of lanes, in a row."""

    @staticmethod
    def device_for(welcome: Welcome) -> torch.device:
        backend = welcome.content.get("backend")
        if backend == "gloo":
            return torch.device("cpu")
        if backend != "nccl":
            raise WireError(f"the executor wants to send tensors by {backend!r}")
        if not torch.cuda.is_available():
            raise RefusedError("this executor's tensors travel by NCCL, and there is no GPU here; use tcp://")
        return torch.device("cuda", torch.cuda.current_device())

    def _use(self, connection: Connection) -> None:
        local, remote = connection.ends
        backend = self.welcome.content["backend"]

        def tell(note: Note) -> None:
            connection.send([wire.pack(Type.RENDEZVOUS, *note)])

        self._close_lanes()
        self._lanes = Lanes(backend, TENANT, self.device, local, remote, tell, self._broken)
        super()._use(connection)

    def _broken(self, error: SymbiosisError) -> None:
        self._failures += 1
        if self._failures > MAX_FAILURES:  # messages come through, tensors do not: no use in another connection
            self._end(error)
        else:
            self._lost(error)

    def _transmit(self, connection: Connection, pending: Pending) -> None:
        assert self._lanes is not None
        call = pending.call
        connection.send([wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))])
        self._lanes.send([tensor.detach().to(self.device).contiguous() for tensor in call.tensors])

    def _received(self, message: Message) -> None:
        if message.type is Type.RENDEZVOUS and self._lanes is not None:
            self._lanes.met(Note(*wire.read_rendezvous(message.content)))
        else:
            super()._received(message)

    def _take_results(self, pending: Pending, frames: Frames) -> None:
        assert self._lanes is not None
        _, dtype, widths = self._expects(pending.call.key)
        self._failures = 0
        results = tuple([torch.empty(pending.rows, width, dtype=dtype, device=self.device) for width in widths])
        self._lanes.receive(results, partial(self._settle, pending, results))

    def _lost(self, error: SymbiosisError) -> None:
        self._close_lanes()
        super()._lost(error)

    def _end(self, error: SymbiosisError) -> None:
        self._close_lanes()
        super()._end(error)

    def _close_lanes(self) -> None:
        if self._lanes is not None:
            self._lanes.close()


class DistTransport(TcpTransport):
    """Listen on, or connect to, a TCP port; the options are those of ``tcp://``, and one more.

    Args:
        backend: "nccl" or "gloo", for a listener; by default NCCL where the executor is on CUDA. Over gloo, tensors on
            CUDA go through host memory.
    """

    _channel = DistChannel

    def __init__(
        self,
        key: str | Path | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        retry: float = 60.0,
        limits: Limits | None = None,
        progress: Progress | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(key, keys, insecure, retry, limits, progress)
        if backend not in (None, *BACKENDS):
            raise UsageError(f"backend is {backend!r}; it can be {' or '.join(BACKENDS)}")
        if not torch.distributed.is_available():
            raise UsageError("this build of torch has no torch.distributed; use tcp://")
        self._backend = backend

    async def listen(self, address: str, service: Service) -> TcpListener:
        if not self._insecure:
            raise UsageError(
                f"{address}: what torch.distributed sends is not encrypted, keys or not, and it does not ask who it "
                "talks to; give insecure=True (--insecure) if all on this network may be trusted, or use tcp://"
            )
        return await super().listen(address, service)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        # Lanes live on an event loop; so does this client's end of them, in a thread of its own.
        options = self._options()
        thread = LoopThread()
        try:
            with bar_unless(options.progress, address) as progress:
                hello = Hello(client, terms)
                channel = thread.run(DistChannel.open(address, hello, options._replace(progress=progress)))
            return ThreadedChannel(thread, channel)
        except BaseException:
            thread.close()
            raise

    def _listener(self, endpoint: Endpoint, service: Service) -> TcpListener:
        backend = self._backend or ("nccl" if service.device.type == "cuda" else "gloo")
        return DistListener(endpoint, service, self._limits, self._keys, backend)
