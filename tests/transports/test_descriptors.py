"""Executors that run out of file descriptors tell clients that they are busy."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

import symbiosis
from symbiosis.errors import BusyError
from symbiosis.transports import descriptors
from tests.helpers import IDS, until

KEPT = 20
"""Descriptors that connections leave to the rest of the process, in these tests."""


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process may open 30 more descriptors, and connections leave others to it beyond these."""
    monkeypatch.setattr(descriptors, "SPARE", KEPT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 30 + KEPT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_client_is_told_that_the_executor_is_busy(base: Any, tmp_path: Path, scheme: str) -> None:
    address = f"shm://{tmp_path}/s.sock" if scheme == "shm" else "tcp://127.0.0.1:0"
    async with symbiosis.Executor(base) as executor, AsyncExitStack() as stack:
        address = (await executor.listen(address)).address
        remote = await stack.enter_async_context(symbiosis.connect(address, retry=0.0))
        first = await stack.enter_async_context(remote.client(name="first"))

        async def many() -> None:
            for _ in range(30):
                await stack.enter_async_context(remote.client())

        with pytest.raises(BusyError, match="no file descriptors are left"):
            await many()
        await first.forward(input_ids=IDS)
        await stack.aclose()
        await until(lambda: not executor.status()["clients"])
        async with symbiosis.connect(address) as again, again.client() as client:
            await client.forward(input_ids=IDS)


SERVICE = """
import asyncio, resource, sys, symbiosis
from symbiosis.log import render
from symbiosis.testing import tiny_model

async def main():
    render(False)
    async with symbiosis.Executor(tiny_model("llama")) as executor:
        await executor.listen(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(2.0)
        print("ended", flush=True)

asyncio.run(main())
"""


@pytest.mark.thorough
def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """The executor refuses them while it has descriptors left. With none left, asyncio reported each attempt to accept
    one of them, for nine tenths of a core.
    """
    path, errors = str(tmp_path / "s.sock"), tmp_path / "errors"
    command = [sys.executable, "-W", "ignore", "-c", SERVICE, f"shm://{path}"]
    with ExitStack() as stack:
        log = stack.enter_context(errors.open("w"))
        service = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        )
        assert service.stdin is not None
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        for _ in range(600):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.settimeout(10)
            peer.connect(path)
        service.stdin.write("end\n")
        service.stdin.close()
        assert service.stdout.readline() == "ended\n"
    assert "out of system resource" not in errors.read_text()
    assert "no file descriptors are left" in errors.read_text()
