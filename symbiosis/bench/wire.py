"""Round trips of one call over each transport, against the raw echo of the same mechanism.

The raw echoes have neither checks nor a layer. Over a Unix socket a message of the same size goes there and back, and
matrices are copied into shared memory on either side. Over TCP a process returns what it has read, without TLS. By
torch.distributed (gloo) a size and as many bytes are returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import served
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind

WIDTH = 16
SIZES = {"1 row": 1, "1 MiB": (1 << 20) // (4 * WIDTH)}
GOALS = {"shm_vs_echo": "≤ 3", "tcp_1mb_vs_echo": "≤ 1.5"}
MESSAGE = 24
"""Approximate size of a call's message in bytes."""
ROUND = {"1 row": 300, "1 MiB": 40}
"""Round trips in one measurement."""


async def wire(*, transports: tuple[str, ...], rounds: int, progress: Callable[[str], None]) -> Report:
    """Measure microseconds per round trip of a synchronous client's call and of the echo, interleaved.

    The layer is an ``nn.Linear`` with 16 features, which costs almost nothing.
    """
    report = Report("wire", "", GOALS)
    for transport in transports:
        echo = {"shm": _unix_echo, "tcp": _tcp_echo, "dist": _gloo_echo}[transport]
        with (
            served("wire", transport, "no-lockstep", "linear") as service,
            echo() as send,
            contextlib.closing(make_transport(service.address).connect_blocking(service.address, "bench")) as channel,
        ):
            for size, rows in SIZES.items():
                call = partial(channel.call, Call(_KEY, Kind.DECODE, (torch.randn(rows, WIDTH),)))
                echoed = partial(send, 4 * rows * WIDTH)
                ours: list[float] = []
                raw: list[float] = []
                for turn in range(-1, rounds):
                    progress(f"{transport}, {size}: round {turn + 1} of {rounds}")
                    await asyncio.sleep(0)  # so that Ctrl-C ends the run
                    pair = _time(call, ROUND[size]), _time(echoed, ROUND[size])
                    if turn >= 0:
                        ours.append(pair[0])
                        raw.append(pair[1])
                report.rows.append(
                    {
                        "transport": transport,
                        "rows": size,
                        "call µs": median(ours) * 1e6,
                        "raw echo µs": median(raw) * 1e6,
                        "ratio": ratio(ours, raw),
                    }
                )
                suffix = "" if rows == 1 else "_1mb"
                report.headline[f"{transport}{suffix}_vs_echo"] = ratio(ours, raw)
                if rows == 1:
                    report.headline[f"calls_per_s_{transport}"] = 1 / median(ours)
    report.notes.append(
        f"Medians of {rounds} rounds; a call is a synchronous client's, forward through a linear layer of {WIDTH} "
        "features in a process of its own, results copied out. The raw Unix-socket echo takes some 12 µs while the "
        "kernel keeps both its ends on one core and 54 µs otherwise, which changes at random, so compare the times as "
        "well as the ratio."
    )
    return report


_KEY = Key((0,), Pass.FORWARD)


def _time(fn: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        fn()
    return (time.perf_counter() - start) / count


@contextlib.contextmanager
def _echo_process(code: str, *arguments: str, **options: Any) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process alone
        **options,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.communicate()


_UNIX = """
import asyncio, mmap, os, sys, threading
try: from uvloop import run
except ImportError: from asyncio import run
path, fd = sys.argv[1], int(sys.argv[2])
shared = mmap.mmap(fd, 4 << 20)
class Echo(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data):
        size = int.from_bytes(data[:8], "little")
        if size > 4096: shared[2 << 20 : (2 << 20) + size] = shared[:size]
        self.transport.write(data)
async def main():
    await asyncio.get_running_loop().create_unix_server(Echo, path)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
run(main())
"""


@contextlib.contextmanager
def _unix_echo() -> Iterator[Callable[[int], object]]:
    descriptor = os.memfd_create("echo")
    os.ftruncate(descriptor, 4 << 20)
    with mmap.mmap(descriptor, 4 << 20) as shared, tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "echo.sock")
        echo = _echo_process(_UNIX, path, str(descriptor), pass_fds=[descriptor])
        with echo, socket.socket(socket.AF_UNIX) as connected:
            connected.connect(path)
            payload = bytes(1 << 20)

            def send(size: int) -> None:
                if size > 4096:
                    shared[:size] = payload
                connected.sendall(size.to_bytes(8, "little") + bytes(MESSAGE - 8))
                connected.recv(4096)
                if size > 4096:
                    bytearray(shared[2 << 20 : (2 << 20) + size])

            yield send
    os.close(descriptor)


_TCP = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
connected, _ = listening.accept()
connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
head, body = bytearray(32), memoryview(bytearray(4 << 20))
while connected.recv_into(head, 32, socket.MSG_WAITALL) == 32:
    size = int.from_bytes(head[:8], "little")
    connected.recv_into(body, size, socket.MSG_WAITALL) if size else None
    connected.sendall(b"".join([head, body[:size]]) if size < 65536 else head)
    if size >= 65536: connected.sendall(body[:size])
"""


@contextlib.contextmanager
def _tcp_echo() -> Iterator[Callable[[int], object]]:
    code = [sys.executable, "-c", _TCP]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(code, stdout=subprocess.PIPE, start_new_session=True))
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        connected = stack.enter_context(socket.create_connection(address))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload, back = memoryview(bytes(1 << 20)), bytearray(MESSAGE + 8 + (1 << 20))

        def send(size: int) -> None:
            head = size.to_bytes(8, "little") + bytes(MESSAGE)
            connected.sendall(b"".join([head, payload[:size]]) if size < 65536 else head)
            if size >= 65536:
                connected.sendall(payload[:size])
            connected.recv_into(back, len(head) + size, socket.MSG_WAITALL)

        yield send


_GLOO = """
import sys, torch, torch.distributed as dist
from symbiosis.process_groups import gloo
group = gloo(dist.FileStore(sys.argv[1], 2), 0, 2, "127.0.0.1", 600)
size, buffer = torch.zeros(1, dtype=torch.int64), torch.zeros(1 << 20, dtype=torch.uint8)
while True:
    group.recv([size], 1, 0).wait()
    if not size: break
    group.recv([buffer[:size]], 1, 0).wait()
    group.send([buffer[:size]], 1, 0).wait()
"""


@contextlib.contextmanager
def _gloo_echo() -> Iterator[Callable[[int], object]]:
    import torch.distributed as dist

    from symbiosis.process_groups import gloo  # other transports do without torch.distributed

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rendezvous")
        process = subprocess.Popen([sys.executable, "-c", _GLOO, path], start_new_session=True)
        group = gloo(dist.FileStore(path, 2), 1, 2, "127.0.0.1", 600)  # type: ignore[attr-defined]
        there, back = (torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2))

        def send(size: int) -> None:
            group.send([torch.tensor([size])], 0, 0).wait()
            group.send([there[:size]], 0, 0).wait()
            group.recv([back[:size]], 0, 0).wait()

        try:
            yield send
        finally:
            group.send([torch.tensor([0])], 0, 0).wait()
            process.wait()
