"""Every built-in transport passes the public conformance kit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from symbiosis.testing.transport import TransportConformance
from symbiosis.transports import lanes
from symbiosis.transports.keys import new_key

_names = itertools.count(1)


async def hang_up(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    with contextlib.suppress(OSError):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class TestInProc(TransportConformance):
    blocking = False
    reconnects = False

    def address(self, folder: Path) -> str:
        return f"inproc://conformance-{next(_names)}"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {}


class TestShm(TransportConformance):
    def address(self, folder: Path) -> str:
        return f"shm://{folder}/s.sock"

    async def throw(self, address: str, data: bytes) -> None:
        _, writer = await asyncio.open_unix_connection(address.removeprefix("shm://"))
        await hang_up(writer, data)


class TestTcp(TransportConformance):
    def address(self, folder: Path) -> str:
        return "tcp://127.0.0.1:0"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {**super().connect_options(folder), "key": None}  # an option that is no text

    async def throw(self, address: str, data: bytes) -> None:
        host, _, port = address.partition("://")[2].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await hang_up(writer, data)


class TestTcpWithKeys(TestTcp):
    def listen_options(self, folder: Path) -> dict[str, Any]:
        if not (folder / "server.secret").exists():
            new_key(folder, "server")
            new_key(folder, "alice")
        return {"keys": folder}

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {**super().connect_options(folder), "key": folder / "alice.secret"}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limit, so that a lane whose other side was killed while it opened ends within the test."""
    monkeypatch.setattr(lanes, "WITHIN_S", 10.0)
    monkeypatch.setattr(lanes, "MEET_WITHIN_S", 1.0)  # five times that at most, which is enough for a busy machine


@pytest.mark.usefixtures("impatient")
class TestDist(TestTcp):
    """The tests run over gloo, because NCCL needs two GPUs."""

    def address(self, folder: Path) -> str:
        return "dist://127.0.0.1:0"

    def listen_options(self, folder: Path) -> dict[str, Any]:
        return {"insecure": True}


@pytest.mark.usefixtures("impatient")
class TestDistWithKeys(TestTcpWithKeys):
    def address(self, folder: Path) -> str:
        return "dist://127.0.0.1:0"

    def listen_options(self, folder: Path) -> dict[str, Any]:
        return {**super().listen_options(folder), "insecure": True}
