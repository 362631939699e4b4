"""Attacks on an executor's memory, for a process of their own: ``python -m tests.attack NAME SECONDS ADDRESS [KEY]``.

Each attack holds as much of the executor's memory as it can. It repeats until the time is over, and prints how often it
was disconnected.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from symbiosis.core.requests import Expected, Key, Pass, expected
from symbiosis.core.share import layers_of
from symbiosis.core.terms import Kind
from symbiosis.errors import SymbiosisError
from symbiosis.transports import wire
from symbiosis.transports.arena import Arena, spread
from symbiosis.transports.keys import load_key
from symbiosis.transports.sockets import resolve
from symbiosis.transports.stream import ByteStream, TlsByteStream
from symbiosis.transports.wire import CallMessage, Hello, Type

Step = Callable[[], object]
_names = itertools.count()


class Line:
    """A connection that can be filled until the executor does not take more."""

    def __init__(self, address: str, key: Path | None) -> None:
        self.waiting = b""
        """Bytes that the executor has not taken."""
        self._stream: Any = ByteStream(wire.MAX_TO_CLIENT)
        if address.startswith("shm://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.removeprefix("shm://"))
        else:
            self.socket = socket.create_connection(resolve(address), 5)
        self.socket.settimeout(5)
        if key is not None:
            context = load_key(key).context
            assert context is not None
            self._stream = TlsByteStream(wire.MAX_TO_CLIENT, context, server=False)
            while not self._stream.ready:
                self.socket.sendall(self._stream.unsent())
                self._fill()

    def _fill(self) -> None:
        count = self.socket.recv_into(self._stream.room())
        if not count:
            raise EOFError
        self._stream.filled(count)

    def join(self, address: str) -> dict[str, Any]:
        """Join, and return the content of WELCOME."""
        self.send(wire.pack_hello(Hello(f"mallory-{os.getpid()}-{next(_names)}")))
        descriptors: list[int] = []
        if address.startswith("shm://"):
            _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 2)
        while (found := self._stream.next()) is None:
            self._fill()
        type_, content = wire.unpack_answer(found[0])
        if type_ is not Type.WELCOME:
            raise EOFError(content)
        if descriptors:
            self.arena = Arena(descriptors[0], content[0]["arena_bytes"])
            for descriptor in descriptors:
                os.close(descriptor)
        self.socket.setblocking(False)
        return content[0]  # type: ignore[no-any-return]

    def send(self, message: bytes, payload: int = 0, sent: int = 0, fill: bytes = b"\0") -> None:
        """Send a message and the first ``sent`` bytes of its payload, or as much as the executor takes. The payload
        repeats the byte ``fill``."""
        data = self.waiting + b"".join(self._stream.encode(message, payload, [fill * sent] if sent else []))
        taken = 0
        with suppress(BlockingIOError):
            while taken < len(data):
                taken += self.socket.send(data[taken:])
        self.waiting = data[taken:]

    def push(self) -> bool:
        """Send what waits. Return whether everything was taken."""
        if self.waiting:
            with suppress(BlockingIOError):
                self.waiting = self.waiting[self.socket.send(self.waiting) :]
        return not self.waiting

    def forget(self) -> None:
        """Read what has come, and forget it."""
        with suppress(BlockingIOError):
            while self.socket.recv(1 << 20):
                pass


class Tenant(Line):
    """A line whose client has joined."""

    def __init__(self, address: str, key: Path | None) -> None:
        super().__init__(address, key)
        welcome = self.join(address)
        self.layers = layers_of(welcome["share"])
        self.limit = wire.read_limits(welcome["limits"]).arena_bytes
        self._ids = itertools.count()

    def largest(self, key: Key, part: int = 1) -> tuple[int, Expected]:
        """Return the rows of the largest call for a key, divided by ``part``, and its shapes."""
        due = expected(self.layers, key)
        one = sum(width * dtype.itemsize for width, dtype in due.call + due.answer)
        return max(1, (self.limit // part - 4096) // one), due

    def call(
        self, key: Key, rows: int, incoming: int, sent: int, place: int = 0, answer: int = 0, fill: bytes = b"\0"
    ) -> None:
        message = CallMessage(next(self._ids), key, Kind.PREFILL, rows, place, answer)
        self.send(wire.pack_call(message), incoming, sent, fill)


def strangers(address: str, key: Path | None) -> Step:
    """A peer without a key, which sends something that is no handshake, or a part of one."""
    line = Line(address, None)
    line.socket.setblocking(False)
    data = random.choice([b"", b"\x16\x03\x01\x40\x00", os.urandom(1 << 20), b"\x16\x03\x01\x3f\xff" + bytes(1 << 20)])

    def step() -> None:
        line.waiting = line.waiting or data
        line.push()

    return step


def stalled(address: str, key: Path | None) -> Step:
    """Announces the largest call, and sends a half of its tensors."""
    line = Tenant(address, key)
    rows, due = line.largest(Key((0,), Pass.FORWARD))
    size = spread(rows, due.call)
    line.call(Key((0,), Pass.FORWARD), rows, size, size // 2)
    return line.push


def unread(address: str, key: Path | None) -> Step:
    """Makes calls with large results, and does not read them."""
    line = Tenant(address, key)
    head = Key((line.layers[-1].layer,), Pass.FORWARD)
    rows, due = line.largest(head, random.choice([1, 3, 60]))
    size = spread(rows, due.call)
    return lambda: line.push() and line.call(head, rows, size, size)


def questions(address: str, key: Path | None) -> Step:
    """Asks for the share and the status, and does not read them."""
    line = Tenant(address, key)
    messages = [wire.pack(Type.SHARE, 0), wire.pack(Type.STATUS), wire.PING]
    return lambda: line.push() and [line.send(random.choice(messages)) for _ in range(100)]


def groups(address: str, key: Path | None) -> Step:
    """Makes calls for ever new groups of layers, of different sizes, and does not read the results."""
    line = Tenant(address, key)

    def step() -> None:
        if line.push():
            first = random.choice([one for one in line.layers if one.linear])
            mates = [one.layer for one in line.layers if one.linear and one.in_features == first.in_features]
            some = random.sample(mates, random.randint(1, min(len(mates), wire.MAX_SIBLINGS)))
            chosen = Key(tuple(sorted(some)), random.choice([Pass.FORWARD, Pass.FORWARD_WITHOUT_BIAS, Pass.NORMS]))
            rows, due = line.largest(chosen, random.choice([1, 10, 1000]))
            size = spread(rows, due.call)
            line.call(chosen, rows, size, size)

    return step


def experts(address: str, key: Path | None) -> Step:
    """Sends rows through as many experts as there are, or more; their numbers and weights are -1 and NaN, or huge."""
    line = Tenant(address, key)
    (bank, *_) = [one for one in line.layers if one.experts]

    def step() -> None:
        line.forget()
        if line.push():
            pass_ = random.choice([Pass.FORWARD, Pass.BACKWARD])
            chosen = Key((bank.layer,), pass_, random.random() < 0.5, random.choice([1, bank.experts]))
            rows, due = line.largest(chosen, random.choice([1, 10, 1000]))
            size = spread(rows, due.call)
            wrong = random.choice([0, 0, 0, bank.experts + 1, (1 << 63) - 1])
            sent = chosen._replace(choices=wrong) if wrong else chosen
            line.call(sent, rows, size, size, fill=random.choice([b"\0", b"\xff", b"\x7f"]))

    return step


def arenas(address: str, key: Path | None) -> Step:
    """Makes many calls that lie on each other in an arena (``shm://``), and does not read the answers."""
    line = Tenant(address, None)
    head = Key((line.layers[-1].layer,), Pass.FORWARD)

    def step() -> None:
        if line.push():
            rows, due = line.largest(head, random.choice([1, 8, 64]))
            incoming = spread(rows, due.call)
            size = incoming + spread(rows, due.answer)
            place = random.randrange(0, max(64, line.limit - size), 64)
            line.call(head, rows, 0, 0, place, place + incoming)

    return step


def joins(address: str, key: Path | None) -> Step:
    """Joins, and does not read the welcome."""
    line = Line(address, key)
    line.socket.setblocking(False)
    line.send(wire.pack_hello(Hello(f"joins-{os.getpid()}-{next(_names)}")))
    return line.push


def torn(address: str, key: Path | None) -> Step:
    """Sends all of a call but a few bytes, and closes the connection."""
    line = Tenant(address, key)
    rows, due = line.largest(Key((0,), Pass.FORWARD), 8)
    size = spread(rows, due.call)
    line.call(Key((0,), Pass.FORWARD), rows, size, size - 64)

    def step() -> None:
        if line.push():
            line.socket.close()
            raise EOFError

    return step


def cancelled(address: str, key: Path | None) -> Step:
    """Makes calls and cancels them at once."""
    line = Tenant(address, key)
    rows, due = line.largest(Key((0,), Pass.FORWARD), 8)
    size = spread(rows, due.call)
    ids = itertools.count()

    def step() -> None:
        if line.push():
            line.call(Key((0,), Pass.FORWARD), rows, size, size)
            line.send(wire.pack(Type.CANCEL, next(ids)))

    return step


ATTACKS = {
    one.__name__: one
    for one in (strangers, stalled, unread, questions, groups, experts, arenas, joins, torn, cancelled)
}
LINES = 60


def main(name: str, seconds: float, address: str, key: Path | None) -> None:
    end = time.monotonic() + seconds
    steps: list[Step] = []
    lost = 0
    while time.monotonic() < end:
        if len(steps) < LINES:
            with suppress(OSError, EOFError, SymbiosisError):  # it is refused
                steps.append(ATTACKS[name](address, key))
        for step in list(steps):
            try:
                step()
            except (OSError, EOFError):
                steps.remove(step)
                lost += 1
        time.sleep(0.005)
    print(f"{name}: {len(steps)} connections at the end, {lost} lost")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], Path(sys.argv[4]) if len(sys.argv) > 4 else None)
