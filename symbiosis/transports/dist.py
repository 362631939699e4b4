"""``dist://host:port``: tensors by ``torch.distributed``, point to point: NCCL between GPUs, gloo between CPUs.

All but the tensors is as over ``tcp://``: ZeroMQ carries the messages, CURVE keys tell which tenant a message comes
from, the limits are the same. The tensors of a CALL and of a RESULT follow their message on a lane
(:mod:`symbiosis.transports.lanes`).

It is for hosts of one cluster that trust each other (decision 0021). torch.distributed encrypts nothing and does not
authenticate its peers, so a listener must be told ``insecure=True``, with or without keys, and so must a client whose
executor is on another host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Listener, Service, Session
from symbiosis.errors import RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.carrier import Arrived
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.chunks import Progress, bar_unless
from symbiosis.transports.lanes import BACKENDS, EXECUTOR, TENANT, Lanes
from symbiosis.transports.outstanding import Pending, Results
from symbiosis.transports.sockets import local_ip, resolve
from symbiosis.transports.tcp import TcpTransport
from symbiosis.transports.tcp_client import MAX_FRAME_BYTES, Options, TcpConnection, TcpConnector
from symbiosis.transports.tcp_listener import TcpListener
from symbiosis.transports.tcp_peer import ShareCourier, TcpLine
from symbiosis.transports.threads import LoopThread, ThreadedChannel
from symbiosis.transports.wire import CallMessage, Hello, Limits, Type

__all__ = ["DistTransport"]

MAX_FAILURES = 5
"""Lanes that may break one after another without a result in between. Messages come through then and tensors do not;
another connection does not help."""


class DistTransport(TcpTransport):
    """Listen on, or connect to, a TCP port.

    Args:
        key, keys, retry, limits, progress: as for :class:`~symbiosis.transports.tcp.TcpTransport`.
        insecure: confirms that every host on the network is trusted.
        backend: "nccl" or "gloo", for a listener; by default NCCL if the executor is on CUDA. Over gloo, tensors on
            CUDA go through host memory.

    Raises:
        UsageError: an option has no valid value, or this build of torch has no torch.distributed.
    """

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

    async def listen(self, address: str, service: Service) -> Listener:
        if not self._insecure:
            raise UsageError(
                f"{address}: torch.distributed encrypts nothing, keys or not, and does not authenticate its peers; "
                "give insecure=True (--insecure) if every host on this network is trusted, or use tcp://"
            )
        backend = self._backend or ("nccl" if service.device.type == "cuda" else "gloo")
        courier = partial(LaneCourier, backend)
        listener = TcpListener(await resolve(address), service, self._limits, self._keys, courier, encrypted=False)
        listener.open(address)
        return listener

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await self._open(address, Hello(client, terms), self._progress)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        thread = LoopThread()  # lanes need an event loop
        try:
            with bar_unless(self._progress, address) as progress:
                channel = thread.run(self._open(address, Hello(client, terms), progress))
            return ThreadedChannel(thread, channel)
        except BaseException:
            thread.close()
            raise

    async def _open(self, address: str, hello: Hello, progress: Progress | None) -> AsyncChannel:
        connector = TcpConnector(address, Options(self._key, self._insecure, progress), LaneCarrierMaker())
        return await AsyncChannel.open(connector, address, hello, self._retry_s)


class LaneCourier:
    """The executor's end of a connection's lanes.

    The lanes open when the client has sent the first message that needs them: a client that only looks has none.
    """

    def __init__(self, backend: str, line: TcpLine, share: ShareCourier) -> None:
        self.free = line.budget.free
        self._backend = backend
        self._line = line
        self._share = share
        self._home = line.service.device
        self._device = self._home if backend == "nccl" else torch.device("cpu")
        self._lanes: Lanes | None = None

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {**self._share.welcome(joined), "backend": self._backend}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is Type.RENDEZVOUS:
            self._open().met(*wire.read_rendezvous(content))
            return True
        return self._share.control(type_, content)

    def _open(self) -> Lanes:
        if self._lanes is None:
            try:
                local = local_ip(self._line.accepted.descriptor)
            except OSError as error:
                raise WireError("its connection has ended") from error
            self._lanes = Lanes(self._backend, EXECUTOR, self._device, local, self._publish, self._broken)
        return self._lanes

    def _publish(self, lane: int, key: str, value: bytes) -> None:
        self._line.send(wire.pack(Type.RENDEZVOUS, lane, key, value))

    def _broken(self, error: SymbiosisError) -> None:
        self._line.drop(str(error))

    def tensors(self, message: CallMessage, session: Session, frames: Sequence[Any]) -> Results | None:
        if frames:
            raise WireError("over dist:// a CALL brings no frames")
        try:
            widths, dtype, _ = session.expects(message.key)
        except SymbiosisError as error:  # its tensors would be taken for those of the next call
            raise WireError(str(error)) from error
        size = message.rows * sum(widths) * dtype.itemsize
        if not size:
            raise WireError("a CALL has at least 1 row")
        self._line.budget.hold(message.id, size)
        tensors = tuple([torch.empty(message.rows, width, dtype=dtype, device=self._device) for width in widths])
        self._open().receive(tensors, partial(self._arrived, message, tensors))
        return None

    def _arrived(self, message: CallMessage, tensors: Results) -> None:
        if not self._line.peer.arrived(message, tuple([tensor.to(self._home) for tensor in tensors])):
            self.free(message.id)  # cancelled on its way

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        lanes = self._open()
        size = sum(result.nbytes for result in results)
        self._line.count_unsent(size)
        self._line.send_parts([wire.pack_result(message.id)])
        if not self._line.peer.gone:
            tensors = [result.to(self._device).contiguous() for result in results]
            lanes.send(tensors, partial(self._line.count_unsent, -size))

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()


class LaneCarrierMaker:
    """Makes a carrier for each connection of a client, until lanes fail again and again."""

    def __init__(self) -> None:
        self._failures = 0
        self._error: SymbiosisError | None = None

    def __call__(self, connection: TcpConnection) -> LaneCarrier:
        if self._failures > MAX_FAILURES and self._error is not None:
            raise self._error
        return LaneCarrier(connection, self._failed, self._worked)

    def _failed(self, error: SymbiosisError) -> None:
        self._failures += 1
        self._error = error

    def _worked(self) -> None:
        self._failures = 0


class LaneCarrier:
    """The client's end of a connection's lanes.

    Args:
        connection: the control connection.
        failed: called when a lane has broken.
        worked: called when results have arrived.
    """

    most_bytes = MAX_FRAME_BYTES

    def __init__(
        self, connection: TcpConnection, failed: Callable[[SymbiosisError], None], worked: Callable[[], None]
    ) -> None:
        backend = connection.welcome.content.get("backend")
        self.device = _device(backend)
        self._connection = connection
        self._failed = failed
        self._worked = worked
        self._arrived: Arrived | None = None
        self._lanes = Lanes(str(backend), TENANT, self.device, connection.ends[0], self._publish, self._broken)

    def start(self, arrived: Arrived) -> None:
        self._arrived = arrived

    def _publish(self, lane: int, key: str, value: bytes) -> None:
        self._connection.send([wire.pack(Type.RENDEZVOUS, lane, key, value)])

    def _broken(self, error: SymbiosisError) -> None:
        self._failed(error)
        self._connection.lose(error)

    def put(self, pending: Pending) -> list[Any] | None:
        call = pending.call
        self._lanes.send([tensor.detach().to(self.device).contiguous() for tensor in call.tensors])
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))]

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        _, dtype, widths = pending.expected
        results = tuple([torch.empty(pending.rows, width, dtype=dtype, device=self.device) for width in widths])
        self._lanes.receive(results, partial(self._took, pending, results))
        return None

    def _took(self, pending: Pending, results: Results) -> None:
        self._worked()
        if self._arrived is not None:
            self._arrived(pending, results)

    def free(self, pending: Pending) -> None:
        pass  # the lane keeps a tensor until it is sent

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is not Type.RENDEZVOUS:
            raise WireError(f"{type_.name} is not for clients of dist://")
        self._lanes.met(*wire.read_rendezvous(content))

    def close(self) -> None:
        self._lanes.close()


def _device(backend: object) -> torch.device:
    """Return the device of a client's tensors."""
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise WireError(f"the executor wants to send tensors by {backend!r}; this client knows gloo and nccl")
    if not torch.cuda.is_available():
        raise RefusedError("this executor's tensors travel by NCCL, and there is no GPU here; use tcp://")
    return torch.device("cuda", torch.cuda.current_device())
