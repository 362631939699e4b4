"""Fuzzing guided by coverage: ``python -m tests.fuzz TARGET FOLDER -max_total_time=3600``. Needs pip install atheris.

Targets are the executor's ends of the transports (shm, tcp, dist), the TLS handshake (tls), and the client's end of
tcp:// (client). The executor serves a small mixture of experts, whose calls have matrices of several dtypes. One input
is one connection: its bytes decide which messages come, sound or not, in which pieces, and when the other side reads.
The folder keeps the inputs that reached new code. Any unexpected exception, and any memory,
session or handle that is left behind, ends the run with the input that did it. ``-runs=0`` only replays the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["symbiosis.transports", "symbiosis.core", "symbiosis.executor"]):
    import torch

    from symbiosis.core.requests import Call, Key, Pass, expected
    from symbiosis.core.terms import Kind
    from symbiosis.errors import RequestError, SymbiosisError
    from symbiosis.host import Executor  # which imports the executor and the scheduler here
    from symbiosis.transports import dist, wire
    from symbiosis.transports.arena import spread
    from symbiosis.transports.connection import joined
    from symbiosis.transports.conversation import CARRIED, Conversation
    from symbiosis.transports.keys import load_key, new_key
    from symbiosis.transports.limits import Limits
    from symbiosis.transports.shm import ShmLine
    from symbiosis.transports.stream import TlsByteStream, frame
    from symbiosis.transports.tcp_client import AsyncTcpConnection
    from symbiosis.transports.tcp_listener import TcpLine
    from symbiosis.transports.wire import CallMessage, Hello, Type

from tests.moe import mixture

LIMITS = Limits(calls=4, rows=64, arena_bytes=1 << 20)


class Pipe:
    """An asyncio transport without a socket behind it. While it is ``stuck``, nothing that is written is read."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.protocol: Any = None
        self.written = bytearray()
        self.stuck = self.closing = False
        self._unread = 0
        self._high = 1 << 16
        self._paused = False

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self.socket, "peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}[name]

    def write(self, data: Any) -> None:
        self.written += data
        if self.stuck:
            self._unread += len(data)
            self._pause_if_full()

    def set_write_buffer_limits(self, high: int = 1 << 16) -> None:
        self._high = high
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        if self._unread > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def read_all(self) -> None:
        """Let the other side read again."""
        self.stuck = False
        self._unread = 0
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._unread

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    close = write_eof = abort

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class FakeLanes:
    """Lanes that deliver at once, or at the next turn of the event loop."""

    def __init__(self, *arguments: Any) -> None:
        self._loop = asyncio.get_running_loop()

    def met(self, *arguments: Any) -> None: ...

    def send(self, tensors: Any, sent: Any) -> None:
        self._loop.call_soon(sent)

    def receive(self, tensors: Any, arrived: Any) -> None:
        for tensor in tensors:
            tensor.zero_()
        self._loop.call_soon(arrived)

    def close(self) -> None: ...

    def when_ended(self, then: Any) -> None:
        self._loop.call_soon(then)


FILLS = [b"\0", b"\1\0\0\0\0\0\0\0", b"\xff", b"\x7f", b"\0\0\xc0\x7f", b"\0\0\0\0\0\0\0\x80"]
"""What matrices repeat: zeros, the expert 1, -1 or NaN, huge numbers, NaN, the least integer."""


def payload_of(data: Any, layers: Any, key: Key, rows: int) -> bytes:
    """Return the matrices of a call, of any values; or other bytes."""
    try:
        due = expected(layers, key).call
    except RequestError:
        due = ()
    if not due or not rows or data.ConsumeIntInRange(0, 7) == 7:
        return bytes(data.PickValueInList([0, 64, 128 * rows, 256 * rows]))
    sizes = [spread(rows, (columns,)) for columns in due]
    fills = [data.PickValueInList(FILLS) for _ in sizes]
    return b"".join((fill * size)[:size] for fill, size in zip(fills, sizes, strict=True))


def message(data: Any, layers: Any, types: Any = tuple(Type)) -> tuple[bytes, bytes]:
    """Return a message, sound in most parts, and its payload."""
    what = data.ConsumeIntInRange(0, 5)
    number = data.ConsumeIntInRange(0, 4)
    if what == 0:
        return wire.pack_hello(Hello(data.ConsumeUnicodeNoSurrogates(3) or None)), b""
    if what <= 2:
        indices = tuple(data.ConsumeIntInRange(0, 9) for _ in range(data.ConsumeIntInRange(1, 3)))
        rows = data.ConsumeIntInRange(0, 70)
        place, answer = (64 * data.ConsumeIntInRange(0, 1 << 15) for _ in range(2)) if what == 1 else (0, 0)
        choices = data.ConsumeIntInRange(0, 5) if data.ConsumeBool() else 0
        key = Key(indices, data.PickValueInList(list(Pass)), data.ConsumeBool(), choices)
        call = CallMessage(number, key, data.PickValueInList(list(Kind)), rows, place, answer)
        return wire.pack_call(call), payload_of(data, layers, key, rows)
    if what == 3:
        content = [
            data.PickValueInList([number, "x", b"y", None, -1, [1], {"a": 1}, (1 << 64) - 1]) for _ in range(number)
        ]
        return wire.pack(data.PickValueInList(list(types)), *content), b""
    if what == 4:
        return wire.pack(data.PickValueInList([Type.CANCEL, Type.SHARE]), number), b""
    return data.ConsumeBytes(data.ConsumeIntInRange(0, 40)), b""


def feed(protocol: Any, data: bytes) -> None:
    """Give a protocol bytes, as an event loop does."""
    while data and not protocol._transport.closing:
        room = protocol.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]


async def play(protocol: Any, data: Any, layers: Any, scheme: str) -> None:
    """Send what an input says over a connection."""
    pipe = protocol._transport
    while data.remaining_bytes() and not pipe.closing:
        what = data.ConsumeIntInRange(0, 9)
        if what < 6:
            sent, payload = message(data, layers)
            if scheme != "tcp" and data.ConsumeBool():  # its tensors go another way
                arena = getattr(protocol.peer._courier, "_arena", None)
                if arena is not None:
                    arena._map[: len(payload)] = payload
                payload = b""
            stream = frame(sent, len(payload)) + payload
            cut = data.ConsumeIntInRange(0, len(stream))
            feed(protocol, stream[:cut])
            feed(protocol, stream[cut:])
        elif what == 6:
            feed(protocol, data.ConsumeBytes(data.ConsumeIntInRange(1, 60)))
        elif what == 7:
            pipe.stuck = True
        elif what == 8:
            pipe.read_all()
        else:
            await asyncio.sleep(0)
    await turns()


async def turns() -> None:
    """Let the event loop run what is ready, and what that makes ready."""
    for _ in range(6):
        await asyncio.sleep(0)


class Fuzzer:
    """One executor, and a connection for each input."""

    def __init__(self, target: str) -> None:
        torch.set_num_threads(1)
        self.target = target
        self.loop = asyncio.new_event_loop()
        self.errors: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.executor = Executor(mixture("mixtral", num_hidden_layers=1), max_bytes=96 << 20)
        self.layers = self.executor.service.layers
        assert any(layer.experts for layer in self.layers)
        self.folder = Path(tempfile.mkdtemp())
        server = socket.create_server(("127.0.0.1", 0))
        self.tcp = socket.create_connection(server.getsockname())
        self.unix, _ = socket.socketpair(socket.AF_UNIX)
        self.listener: Any = self.run(self._open())
        dist.Lanes = FakeLanes  # type: ignore[assignment, misc]
        ShmLine.send_descriptors = lambda self, arena: None  # type: ignore[method-assign]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _open(self) -> Any:
        await self.executor.start()
        if self.target == "shm":
            return await self.executor.listen(f"shm://{self.folder}/s.sock", limits=LIMITS)
        if self.target == "dist":
            return await self.executor.listen("dist://127.0.0.1:0", limits=LIMITS, insecure=True, backend="gloo")
        for name in ("server", "alice"):
            new_key(self.folder, name)
        keys = {"keys": self.folder} if self.target == "tls" else {}
        return await self.executor.listen("tcp://127.0.0.1:0", limits=LIMITS, **keys)

    def one(self, data: bytes) -> None:
        """Play one input, and check that nothing is left behind."""
        self.run(self._client(atheris.FuzzedDataProvider(data)) if self.target == "client" else self._one(data))
        assert not self.errors, self.errors
        assert self.executor.service.budget.held == 0
        assert not self.executor.service.clients
        assert not self.executor.engine.calls
        assert not self.executor.service.budget._waiting

    async def _one(self, data: bytes) -> None:
        line: Any = (ShmLine if self.target == "shm" else TcpLine)(self.listener)
        pipe = Pipe(self.unix if self.target == "shm" else self.tcp)
        pipe.protocol = line
        line.connection_made(pipe)
        if self.target == "tls":
            self._shake_hands(line, pipe, data)
        else:
            provider = atheris.FuzzedDataProvider(data)
            if provider.ConsumeBool():
                feed(line, frame(wire.pack_hello(Hello("mallory"))))
            await play(line, provider, self.layers, self.target)
        line.connection_lost(None)
        ended = asyncio.Event()
        self.executor.service.when_idle(ended.set)  # a batch may run on the thread of long ones
        await asyncio.wait_for(ended.wait(), 60)
        await turns()

    def _shake_hands(self, line: Any, pipe: Pipe, data: bytes) -> None:
        """Send a sound handshake of which some bytes are changed, or anything."""
        provider = atheris.FuzzedDataProvider(data)
        context = load_key(self.folder / "alice.secret").context
        assert context is not None
        client = TlsByteStream(wire.MAX_TO_CLIENT, context, server=False)
        for _ in range(4):
            sent = bytearray(client.unsent())
            for _ in range(provider.ConsumeIntInRange(0, 2)):
                if sent:
                    sent[provider.ConsumeIntInRange(0, len(sent) - 1)] ^= provider.ConsumeIntInRange(0, 255)
            feed(line, bytes(sent) + provider.ConsumeBytes(provider.ConsumeIntInRange(0, 20)))
            answer, pipe.written = bytes(pipe.written), bytearray()
            with contextlib.suppress(OSError, SymbiosisError):
                while answer and not client.ready:
                    room = client.room()
                    count = min(len(room), len(answer))
                    room[:count] = answer[:count]
                    answer = answer[count:]
                    client.filled(count)
        if client.ready and not pipe.closing:
            with contextlib.suppress(OSError):
                for _ in range(provider.ConsumeIntInRange(0, 4)):
                    sent_message, payload = message(provider, self.layers)
                    parts = client.encode(sent_message, len(payload), [payload])
                    feed(line, b"".join(map(bytes, parts)))

    async def _client(self, data: Any) -> None:
        """Be the executor of a client: a sound welcome with some changes, then any messages."""
        share = self.executor.service.share()
        file = self.listener.share
        welcome = {
            "share": dict(share.description),
            "tokenizer": {},
            "limits": {"calls": 4, "rows": 64, "arena_bytes": 1 << 20, "clients": 1},
            "instance": "i",
            "share_bytes": file.size(),
        }
        if data.ConsumeBool():
            welcome[data.PickValueInList(list(welcome))] = data.PickValueInList([None, 1, -1, "x", {}, [], {"a": b""}])
        sent = frame(wire.pack(Type.WELCOME, welcome))
        for start in range(0, file.size(), 1 << 18):
            chunk = file.chunk(start) if not data.ConsumeProbability() > 0.9 else bytes(data.ConsumeIntInRange(0, 99))
            sent += frame(wire.pack(Type.SHARE, start), len(chunk)) + chunk
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            join = partial(AsyncTcpConnection, address, key=None, insecure=False)
            exchange = asyncio.ensure_future(joined(join, Hello("a"), False))
            theirs, _ = await asyncio.to_thread(server.accept)
        with theirs:
            with contextlib.suppress(OSError):  # the client has left
                await asyncio.to_thread(theirs.sendall, sent)
            if not (await asyncio.wait({exchange}, timeout=0.2))[0]:
                theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(SymbiosisError):
                await self._calls(data, await exchange)

    async def _calls(self, data: Any, connection: AsyncTcpConnection) -> None:
        with contextlib.closing(connection):
            talk = Conversation("tcp://x", Hello("a"), 0.0)
            talk.joined(connection.welcome)
            (bank,) = [layer for layer in self.layers if layer.experts]
            for key in (Key((0,), Pass.FORWARD), Key((bank.layer,), Pass.BACKWARD, choices=2)):
                matrices = expected(self.layers, key).call
                with contextlib.suppress(SymbiosisError):  # the limits in its welcome may be false
                    talk.call(
                        Call(key, Kind.DECODE, tuple(torch.zeros(1, width, dtype=dtype) for width, dtype in matrices))
                    )
            while (pending := talk.outstanding.next()) is not None:
                connection.send(connection.carrier.put(pending))
            while data.remaining_bytes():
                sent, payload = message(data, self.layers)
                feed(connection, frame(sent, len(payload)) + payload)
                while (found := connection._take()) is not None:
                    type_, content, attached = found
                    settled = talk.receive(type_, content)
                    if settled is not None and settled[1] is None:
                        connection.carrier.take(settled[0], attached)
                    if settled is not None:
                        connection.carrier.free(settled[0])
                        talk.outstanding.settle(settled[0])
                    elif type_ in CARRIED:
                        connection.carrier.control(type_, content)


def main() -> None:
    fuzzer = Fuzzer(sys.argv[1])
    atheris.Setup([sys.argv[0], *sys.argv[2:]], fuzzer.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
