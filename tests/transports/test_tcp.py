"""Tests of ``tcp://``: addresses, the share of a model, and killed processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.share import Share
from symbiosis.errors import ClientClosedError, ConnectionLostError, ShareError, UsageError, WireError
from symbiosis.testing import tiny_model
from symbiosis.transports import peer, stream_line
from symbiosis.transports import share as share_module
from symbiosis.transports.share import CHUNK, MAX_SHARE, SLOW_S, ReceivedShare, ServedShare, tensors_in
from symbiosis.transports.sockets import resolve
from tests.helpers import HANGS, IDS, in_thread, until

LOCAL = "tcp://127.0.0.1:0"
RESET = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
"""A socket with this option is not closed but reset."""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# Addresses


@pytest.mark.parametrize(
    "address", ["tcp://", "tcp://host", "tcp://:7000", "tcp://127.0.0.1:x", "tcp://127.0.0.1:70000"]
)
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(UsageError, match="write tcp://host:port"):
        resolve(address)


async def test_no_executor_at_the_address(base: Any) -> None:
    with pytest.raises(ConnectionLostError, match="no executor answers on tcp://"):
        await symbiosis.connect(free_address()).__aenter__()
    with pytest.raises(ConnectionLostError, match=r"no host 'no\.such\.host\.invalid'"):
        await symbiosis.connect("tcp://no.such.host.invalid:7000", insecure=True).__aenter__()


async def test_a_port_in_use(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with pytest.raises(UsageError, match="cannot listen"):
            await executor.listen(listener.address)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12 warns of forks beside threads
async def test_a_closed_port_is_free_while_a_forked_child_lives(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            await listener.close()
            endpoint = resolve(listener.address)
            with pytest.raises(ConnectionRefusedError), socket.create_connection(endpoint, timeout=10):
                pass
            await executor.listen(listener.address)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # noqa: ASYNC222 (it was killed)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["drop", "hang up"])
async def test_a_dropped_connection_ends_while_a_forked_child_lives(
    base: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also one whose end the client does not take."""
    monkeypatch.setattr(stream_line, "GOODBYE_S", 0.01)
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        with socket.create_connection(resolve(listener.address), timeout=10) as client:
            await until(lambda: listener.lines)
            child = os.fork()
            if child == 0:
                signal.pause()
            try:
                for line in list(listener.lines):
                    line.drop("of a test") if how == "drop" else line._abort_soon()
                while await asyncio.to_thread(client.recv, 4096):  # the executor's greeting comes first
                    pass
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # noqa: ASYNC222 (it was killed)


@pytest.mark.parametrize("cycles", range(5))
async def test_connections_that_are_accepted_while_the_listener_closes_end(base: Any, cycles: int) -> None:
    """The listener closes so many cycles of the event loop after clients have connected."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        clients = [socket.create_connection(resolve(listener.address), timeout=20) for _ in range(3)]
        for _ in range(cycles):
            await asyncio.sleep(0)
        await listener.close()
        for client in clients:
            with client, contextlib.suppress(ConnectionResetError):
                while await in_thread(client.recv, 4096):
                    pass
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]
        gc.collect()  # a socket that was lost raises a warning


async def test_ipv6(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://[::1]:0")
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            output = await client.forward(input_ids=IDS)
            torch.testing.assert_close(output.logits, base(IDS).logits)


async def test_the_addresses_of_a_host_are_tried_in_order(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ips = socket.getaddrinfo, ["::1", "127.0.0.1"]

    def getaddrinfo(host: str, *rest: Any, **options: Any) -> Any:
        hosts = ips if host == "host" else [host]
        return [each for ip in hosts for each in found(ip, *rest, **options)]

    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        address = listener.address.replace("127.0.0.1", "host")
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        async with symbiosis.connect(address) as remote:
            assert await remote.status()
        ips.append("192.0.2.1")
        with pytest.raises(UsageError, match="is on another host"):
            await symbiosis.connect(address).__aenter__()


# Share of a model


async def test_share_comes_in_chunks_with_progress(base: Any) -> None:
    model = tiny_model(vocab_size=40_000)  # an embedding of 5 MB
    seen: list[tuple[int, int]] = []
    async with symbiosis.Executor(model) as executor:
        listener = await executor.listen(LOCAL)
        transport = make_transport(listener.address, progress=lambda done, total: seen.append((done, total)))
        channel = await transport.connect(listener.address, "c")
        channel.close()
    assert [done for done, _ in seen[:-1]] == [CHUNK * (index + 1) for index in range(len(seen) - 1)]
    assert seen[-1][0] == seen[-1][1] > 5_000_000


def test_chunks_are_a_safetensors_file() -> None:
    tensors = {
        "a": torch.randn(300, 1000),
        "b": torch.randn(7, 3).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
        "turned": torch.arange(600_000).reshape(1000, 600).t(),
    }
    served = ServedShare(SimpleNamespace(share=lambda: Share({}, tensors, {})))  # type: ignore[arg-type]
    file = ReceivedShare(served.size())
    for start in range(0, served.size(), CHUNK):
        file.add(start, served.chunk(start))
    found = file.tensors()
    file.close()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    for start in (-CHUNK, 1, served.size() + CHUNK):
        with pytest.raises(WireError):
            served.chunk(start)
    served.close()


def test_a_share_for_shm_is_sealed() -> None:
    served = ServedShare(SimpleNamespace(share=lambda: Share({}, {"a": torch.randn(3)}, {})))  # type: ignore[arg-type]
    with pytest.raises(PermissionError):
        os.pwrite(served.descriptor(), b"x", 0)
    served.close()


def test_a_share_that_could_not_be_made_is_made_again() -> None:
    """No client gets the file of the first attempt, which is empty, and which the client could write to."""
    shares = iter([Share({}, {"a": None}, {}), Share({}, {"a": torch.ones(3)}, {})])  # type: ignore[dict-item]
    served = ServedShare(SimpleNamespace(share=lambda: next(shares)))  # type: ignore[arg-type]
    before = psutil.Process().num_fds()
    with pytest.raises(AttributeError):
        served.descriptor()
    assert torch.equal(tensors_in(served.descriptor())["a"], torch.ones(3))
    with pytest.raises(PermissionError):
        os.pwrite(served.descriptor(), b"x", 0)
    served.close()
    assert psutil.Process().num_fds() == before


def test_an_invalid_share() -> None:
    for size in (None, "1", -1, 3, MAX_SHARE):
        with pytest.raises(WireError):
            ReceivedShare(size)
    file = ReceivedShare(2 * CHUNK)
    with pytest.raises(WireError):
        file.add(CHUNK, bytes(CHUNK))
    with pytest.raises(WireError):
        file.add(0, bytes(5))
    file.add(0, bytes(CHUNK))
    file.add(CHUNK, bytes(CHUNK))
    with pytest.raises(WireError, match="cannot be read"):
        file.tensors()
    file.close()


def test_a_share_that_has_no_room_or_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile executor announces what it likes, and sends it as slowly as it likes."""
    with monkeypatch.context() as patch:
        patch.setattr(share_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=CHUNK))
        with pytest.raises(ShareError, match="No space left"):
            ReceivedShare(2 * CHUNK)
    clock = [0.0]
    monkeypatch.setattr(share_module.time, "monotonic", lambda: clock[0])
    file = ReceivedShare(1 << 30)
    for number in range(40):
        file.add(number * CHUNK, bytes(CHUNK))
        clock[0] += 2.0  # 128 KiB a second
    clock[0] += SLOW_S + 10.0
    with pytest.raises(WireError, match="too slowly"):
        file.add(40 * CHUNK, bytes(CHUNK))
    file.close()


# Killed and stopped processes


async def test_a_stopped_client_delays_others_by_a_second_at_most(base: Any) -> None:
    """The client is stopped in the middle of a walk, under a policy whose batches wait for all clients."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        listener = await executor.listen(LOCAL)
        tenant = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGS, listener.address, stdout=subprocess.PIPE
        )
        assert tenant.stdout is not None
        await asyncio.wait_for(tenant.stdout.readline(), 60)
        os.kill(tenant.pid, signal.SIGSTOP)
        async with executor.client() as client:
            out = await asyncio.wait_for(client.forward(input_ids=IDS), 12)  # a second, not one for each layer
            assert torch.equal(out.logits, base(IDS).logits)
        assert len(executor.status()["clients"]) == 1  # the client's kernel still answers, so the client may continue
        tenant.kill()
        await until(lambda: not executor.status()["clients"])
        await tenant.wait()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such limit")
async def test_the_kernels_limits_are_longer_than_an_executor_does_not_read_and_shorter_than_clients_try_again(
    base: Any,
) -> None:
    """Linux takes a receiver that does not read for one that has failed. A name is free when its client is lost."""

    def limit_s(connected: Any) -> float:
        return float(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) / 1000

    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        transport: Any = make_transport(listener.address)
        channel: Any = await transport.connect(listener.address, "alice")
        assert limit_s(channel._connection._socket) > peer.ROOM_WITHIN_S + 10
        (line,) = listener.lines
        assert limit_s(line._transport.get_extra_info("socket")) < transport._retry_s - 10
        channel.close()


async def test_a_client_leaves_that_was_reset_meanwhile(base: Any) -> None:
    """Its event loop was busy, so it does not know yet."""
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        loop = asyncio.get_running_loop()

        def reset() -> None:
            (line,) = listener.lines
            line._transport.get_extra_info("socket").setsockopt(*RESET)
            line._transport.abort()

        async def tenant() -> None:
            channel = await make_transport(listener.address).connect(listener.address, "alice")
            loop.call_soon_threadsafe(reset)
            while listener.lines:
                time.sleep(0.01)  # noqa: ASYNC251 (the event loop must not see the reset)
            channel.close()
            with pytest.raises(ClientClosedError):
                channel.begin_walk()

        await asyncio.wait_for(in_thread(lambda: asyncio.run(tenant())), 60)


async def test_a_closed_model_and_a_forked_child(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)

        def tenant() -> str:
            with symbiosis.open_model(listener.address) as model, torch.no_grad():
                model(input_ids=IDS)
                reading, writing = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        model(input_ids=IDS)
                    except ClientClosedError as error:
                        os.write(writing, str(error).encode())
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
                os.close(writing)
                with os.fdopen(reading) as pipe:
                    told = pipe.read()
                model(input_ids=IDS)  # the parent's model can still be used
            with pytest.raises(ClientClosedError, match="closed"):
                model(input_ids=IDS)
            return told

        assert "forked child" in await in_thread(tenant)
