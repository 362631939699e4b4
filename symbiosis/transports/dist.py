"""``dist://host:port``: tensors by ``torch.distributed``, point to point: NCCL between GPUs, gloo between CPUs.

All but the tensors is as over ``tcp://``: messages, keys, limits. The tensors of a CALL and of a RESULT follow their
message on a lane (:mod:`symbiosis.transports.lanes`).

It is for hosts of one cluster that trust each other (decision 0021). torch.distributed encrypts nothing and does not
authenticate its peers, so a listener must be told ``insecure=True``, with or without keys, and so must a client whose
executor is on another host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symbiosis.core.requests import Columns, Results
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Listener, Service
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.blocking import ThreadedChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.connection import Carrier, Receiver
from symbiosis.transports.conversation import Pending
from symbiosis.transports.courier import Admitted
from symbiosis.transports.lanes import BACKENDS, EXECUTOR, TENANT, Lanes
from symbiosis.transports.limits import Limits
from symbiosis.transports.share import Progress, bar_unless
from symbiosis.transports.sockets import Endpoint, resolve
from symbiosis.transports.tcp import TcpTransport
from symbiosis.transports.tcp_client import AsyncTcpConnection
from symbiosis.transports.tcp_listener import TcpCourier, TcpLine, TcpListener
from symbiosis.transports.wire import CallMessage, Hello, Type

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

    def _endpoint(self, address: str) -> Endpoint:
        if not self._insecure:
            raise UsageError(
                f"{address}: torch.distributed encrypts nothing, keys or not, and does not authenticate its peers; "
                "give insecure=True (--insecure) if every host on this network is trusted, or use tcp://"
            )
        return resolve(address)

    async def listen(self, address: str, service: Service) -> Listener:
        endpoint = await asyncio.to_thread(self._endpoint, address)
        backend = self._backend or ("nccl" if service.device.type == "cuda" else "gloo")
        courier = partial(LaneCourier, backend)
        listener = TcpListener(endpoint, service, self._limits, self._keys, courier)
        await listener.open(address)
        return listener

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await self._open(address, Hello(client, terms), self._progress)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        with bar_unless(self._progress, address) as progress:
            return ThreadedChannel(self._open(address, Hello(client, terms), progress))

    async def _open(self, address: str, hello: Hello, progress: Progress | None) -> AsyncChannel:
        joins = partial(LaneConnection, [], address, **self._options(progress))
        return await AsyncChannel.open(joins, address, hello, self._retry_s)


class LaneCourier(TcpCourier):
    """The executor's end of a connection's lanes.

    The lanes open when the client has sent the first message that needs them: a client that only looks has none.
    """

    can_skip = False

    def __init__(self, backend: str, line: TcpLine) -> None:
        super().__init__(line)
        self._backend = backend
        self._home = line.listener.service.device
        self._device = self._home if backend == "nccl" else torch.device("cpu")
        self._lanes: Lanes | None = None

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {**super().welcome(joined), "backend": self._backend}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is Type.RENDEZVOUS:
            value = wire.read_rendezvous(content)
            self._open().met(*value)
            return True
        return super().control(type_, content)

    def _open(self) -> Lanes:
        if self._lanes is None:
            local = self.line.local_ip()
            self._lanes = Lanes(self._backend, EXECUTOR, self._device, local, self.line.send, self.line.drop)
        return self._lanes

    def check(self, admitted: Admitted, payload: int) -> int:
        if payload:
            raise WireError("over dist:// a CALL has no payload")
        return 0

    def tensors(self, admitted: Admitted) -> Results | None:
        tensors = _empty(admitted.message.rows, admitted.expected.call, self._device)
        self._open().receive(tensors, partial(self._arrived, admitted, tensors))
        return None

    def _arrived(self, admitted: Admitted, tensors: Results) -> None:
        try:
            tensors = tuple([tensor.to(self._home) for tensor in tensors])
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            self.line.drop(f"there is no memory for its call: {error}")
            return
        self.line.peer.arrived(admitted, tensors)

    def answer(self, admitted: Admitted, results: Results, sent: Callable[[], object]) -> None:
        self.line.send(wire.pack_result(admitted.message.id))
        self._open().send([result.to(self._device).contiguous() for result in results], sent)

    def close(self) -> None:
        if self._lanes is not None:
            self._lanes.close()

    def when_ended(self, then: Callable[[], object]) -> None:
        if self._lanes is None:
            then()
        else:
            self._lanes.when_ended(then)


class LaneCarrier(Carrier):
    """The client's end of a connection's lanes.

    Args:
        failures: why lanes of this client have broken since results last arrived; the same list for all connections.
        connection: the control connection.
    """

    def __init__(self, failures: list[SymbiosisError], connection: AsyncTcpConnection) -> None:
        if len(failures) > MAX_FAILURES:
            raise failures[-1]
        backend = connection.welcome.content.get("backend")
        self.device = _device(backend)
        self._failures = failures
        self._connection = connection
        self._channel: Receiver | None = None
        local = connection.local_ip()
        self._lanes = Lanes(str(backend), TENANT, self.device, local, lambda m: connection.send([m]), self._broken)

    def _broken(self, error: SymbiosisError) -> None:
        self._failures.append(error)
        self._connection.lose(ConnectionLostError(f"lost the executor at {self._connection.address}: {error}"))

    def start(self, channel: Receiver) -> None:
        self._channel = channel

    def put(self, pending: Pending) -> list[Any] | None:
        call = pending.call
        self._lanes.send([tensor.detach().to(self.device).contiguous() for tensor in call.tensors])
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))]

    def take(self, pending: Pending, attached: Sequence[Any]) -> Results | None:
        try:
            results = _empty(pending.rows, pending.expected.answer, self.device)
        except (MemoryError, RuntimeError) as error:  # these results would be taken for those of the next call
            if self._channel is not None:
                self._channel.arrived(pending, error)
            self._connection.lose(ConnectionLostError(f"there is no memory for results: {error}"))
            return None
        self._lanes.receive(results, partial(self._took, pending, results))
        return None

    def _took(self, pending: Pending, results: Results) -> None:
        self._failures.clear()
        if self._channel is not None:
            self._channel.arrived(pending, results)

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is not Type.RENDEZVOUS:
            super().control(type_, content)
        self._lanes.met(*wire.read_rendezvous(content))

    def close(self) -> None:
        self._lanes.close()


class LaneConnection(AsyncTcpConnection):
    """A connection whose tensors travel on lanes; ``failures`` are those of :class:`LaneCarrier`."""

    def __init__(self, failures: list[SymbiosisError], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._failures = failures

    async def attach(self) -> None:
        await super().attach()
        self.carrier = LaneCarrier(self._failures, self)


def _empty(rows: int, columns: Sequence[Columns], device: torch.device) -> Results:
    return tuple([torch.empty(rows, width, dtype=dtype, device=device) for width, dtype in columns])


def _device(backend: object) -> torch.device:
    """Return the device of a client's tensors."""
    if backend == "gloo":
        return torch.device("cpu")
    if backend != "nccl":
        raise WireError(f"the executor wants to send tensors by {backend!r}; this client knows gloo and nccl")
    if not torch.cuda.is_available():
        raise RefusedError("this executor's tensors travel by NCCL, and there is no GPU here; use tcp://")
    return torch.device("cuda", torch.cuda.current_device())
