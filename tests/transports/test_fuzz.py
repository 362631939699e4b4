"""Unauthenticated peers send malformed data: the executor serves its clients, and allocates nothing for these peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.testing import tiny_model
from symbiosis.transports import wire
from symbiosis.transports.stream import frame
from symbiosis.transports.wire import CallMessage, Type


class Victim:
    """An executor on a thread of its own, with one honest tenant in its process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.model = tiny_model()
        self.executor = symbiosis.Executor(self.model)
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(30)
        self.honest: Any = make_transport(address).connect_blocking(address, "honest")

    async def _serve(self) -> None:
        async with self.executor:
            await self.executor.listen(self.address)
            self._ready.set()
            await asyncio.to_thread(self._over.wait)

    def check(self) -> None:
        """Check that the honest tenant gets right results."""
        x = torch.randn(3, 32)
        (y,) = self.honest.call(Call(Key((0,), Pass.FORWARD), Kind.DECODE, (x,)))
        torch.testing.assert_close(y, self.model.model.layers[0].self_attn.q_proj(x))
        assert "honest" in self.executor.status()["clients"]

    def close(self) -> None:
        self.honest.close()
        self._over.set()
        self._thread.join(30)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(f"shm://{tmp_path_factory.mktemp('fuzz')}/s.sock")
    yield victim
    victim.close()


hello = st.builds(lambda name: wire.pack_hello(wire.Hello(name)), st.text(max_size=4))
sound_calls = st.builds(
    lambda id_, layer, pass_, rows: wire.pack_call(
        CallMessage(id_, Key((layer,), pass_), Kind.FINETUNE, rows, 0, 1 << 20)
    ),
    st.integers(0, 3),
    st.integers(0, 16),
    st.sampled_from(Pass),
    st.integers(0, 20),
)
others = st.sampled_from([wire.pack(type_, *content) for type_ in Type for content in ((), (1,), (1, 2, 3))])
sound = st.one_of(hello, sound_calls, sound_calls, others)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a recording of a session in which some bytes were changed, cut, repeated or inserted."""
    stream = bytearray(b"".join(frame(message) for message in draw(st.lists(sound, max_size=6))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(stream)))
        what = draw(st.sampled_from(["change", "cut", "repeat", "insert"]))
        if what == "change" and at < len(stream):
            stream[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del stream[at : at + draw(st.integers(1, 8))]
        elif what == "repeat":
            stream[at:at] = stream[at : at + draw(st.integers(1, 40))]
        else:
            stream[at:at] = draw(st.binary(max_size=12))
    return bytes(stream)


@settings(max_examples=150)
@given(first=st.booleans(), stream=mutated())
def test_mutated_sessions(victim: Victim, first: bool, stream: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0.02)
        connection.connect(victim.address.removeprefix("shm://"))
        descriptors: list[int] = []
        with contextlib.suppress(OSError):  # the executor may end the connection at any moment
            if first:
                connection.sendall(frame(wire.pack_hello(wire.Hello("mallory"))))
            connection.sendall(stream)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
            while connection.recv(1 << 16):
                pass
        for descriptor in descriptors:
            os.close(descriptor)
    victim.check()


def test_no_resources_are_leaked(victim: Victim) -> None:
    """After hundreds of connections with malformed data, no descriptors and no memory are left behind."""
    process = psutil.Process()

    def visit(count: int) -> None:
        for number in range(count):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(victim.address.removeprefix("shm://"))
                connection.sendall(frame(wire.pack_hello(wire.Hello(f"visitor-{number}"))))
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
                for descriptor in descriptors:
                    os.close(descriptor)
                with contextlib.suppress(OSError):
                    connection.sendall((0xFFFFFFFF).to_bytes(4, "little") + b"x" * 100)
        victim.check()

    visit(50)
    files, memory = len(list(Path("/proc/self/fd").iterdir())), process.memory_full_info().uss
    visit(300)
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2
    assert process.memory_full_info().uss < memory + (32 << 20)
    assert victim.executor.status()["clients"] == ["honest"]
