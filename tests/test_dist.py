"""``dist://``: messages by ZeroMQ, tensors by torch.distributed (gloo here; NCCL takes two GPUs)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import BrokenError, ConnectionLostError, UsageError, WireError
from symbiosis.testing import Comparison, run_job, run_job_plain, tiny_model
from symbiosis.transports import lane_process, rendezvous, wire
from symbiosis.transports.keys import new_key
from symbiosis.transports.lane_process import LaneProcess, LaneProcesses
from symbiosis.transports.lanes import Lanes
from symbiosis.transports.rendezvous import EXECUTOR, TENANT, Note
from symbiosis.transports.tcp_connection import Connection
from symbiosis.transports.wire import Limits, Type
from tests.helpers import BATCH, HANGS, IDS, METHODS, adamw, assert_close, crowd, in_thread, lora, restart, until
from tests.raw import a_call, hello, raw, receive, rows
from tests.service import free_port

LOCAL = "dist://127.0.0.1:0"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of hostile clients end within the test."""
    monkeypatch.setattr(rendezvous, "WITHIN_S", 10.0)
    monkeypatch.setattr(rendezvous, "MEET_WITHIN_S", 3.0)  # five times that at most, and enough for a busy machine


@pytest.fixture(scope="module", autouse=True)
def _held() -> Iterator[list[LaneProcesses]]:
    """The process that forks lanes stays from one test to the next: it takes a second to load torch."""
    held = [LaneProcesses.take()]
    yield held
    for processes in held:
        processes.close()


@pytest.fixture
def _not_held(_held: list[LaneProcesses]) -> Iterator[None]:
    """It ends with the test's last listener."""
    _held.pop().close()
    yield
    _held.append(LaneProcesses.take())


# --------------------------------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("method", [*METHODS, None])
async def test_coroutines_alone_bit_equal(base: Any, method: str | None) -> None:
    config = METHODS[method]("llama") if method else None
    expected = run_job_plain(base, copy.deepcopy(config))
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(config, seed=0) as client:
            outcome = await run_job(client)
    comparison = Comparison.of(outcome, expected)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
async def test_synchronous_code_alone_bit_equal(base: Any, base_layers: str) -> None:
    expected = run_job_plain(base, lora())
    async with symbiosis.Executor(base, base_layers=base_layers) as executor:
        listener = await executor.listen(LOCAL, insecure=True)

        def tenant() -> Any:
            with symbiosis.open_model(listener.address) as opened:
                return run_job_plain(opened, lora())

        comparison = Comparison.of(await in_thread(tenant), expected)
        assert comparison.bit_equal, comparison
        assert executor.statistics().requests > 100


async def test_bfloat16() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    expected = run_job_plain(model, lora())
    async with symbiosis.Executor(model) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
            comparison = Comparison.of(await run_job(client), expected)
    assert comparison.bit_equal, comparison


async def test_among_others(base: Any) -> None:
    expected = run_job_plain(base, lora())
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
            async with crowd(executor, [(lora(), "train"), (None, "generate")]):
                outcome = await run_job(client)
    assert_close(outcome, expected)


async def test_ipv6(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("dist://[::1]:0", insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            output = await client.forward(input_ids=IDS)
            torch.testing.assert_close(output.logits, base(IDS).logits)


# ----------------------------------------------------------------------------------------------------------- addresses


async def test_it_must_be_told_that_everybody_is_trusted(base: Any, tmp_path: Path) -> None:
    """Keys or not: torch.distributed encrypts nothing, and trusts its peers."""
    new_key(tmp_path, "server")
    key = new_key(tmp_path, "alice")
    async with symbiosis.Executor(base) as executor:
        for address in ("dist://0.0.0.0:0", LOCAL):
            with pytest.raises(UsageError, match="not encrypted"):
                await executor.listen(address, keys=tmp_path)
        with pytest.raises(UsageError, match="insecure=True"):
            await symbiosis.connect("dist://192.0.2.1:7000", key=key).__aenter__()
        listener = await executor.listen("dist://0.0.0.0:0", keys=tmp_path, insecure=True)
        address = listener.address.replace("0.0.0.0", "127.0.0.1")
        async with symbiosis.connect(address, key=key) as remote, remote.client() as client:
            await client.forward(input_ids=IDS)


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="gloo or nccl"):
        make_transport(LOCAL, backend="mpi")


async def test_nccl_without_a_gpu(base: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True, backend="nccl")
        async with symbiosis.connect(listener.address) as remote:
            with pytest.raises(symbiosis.errors.RefusedError, match="no GPU here; use tcp://"):
                await remote.client().open()


# -------------------------------------------------------------------------------------------------- restarts and deaths


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_survives_a_restart(base: Any, kind: str) -> None:
    expected = run_job_plain(base, lora())
    address = f"dist://127.0.0.1:{free_port()}"
    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(3)]
    await executors[0].start()
    await executors[0].listen(address, insecure=True)

    async def coroutine() -> Any:
        async with symbiosis.connect(address, retry=30.0) as remote, remote.client(lora(), seed=0) as client:
            return await run_job(client)

    def synchronous() -> Any:
        with symbiosis.open_model(address, retry=30.0) as model:
            return run_job_plain(model, lora())

    job = asyncio.create_task(coroutine() if kind == "coroutines" else in_thread(synchronous))
    await restart(address, executors, job, insecure=True)
    comparison = Comparison.of(await asyncio.wait_for(job, 60), expected)
    await executors[-1].close()
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize(
    ("how", "within_s"),
    [(signal.SIGKILL, 3.0), pytest.param(signal.SIGSTOP, 15.0, marks=pytest.mark.slow)],
    ids=["killed", "frozen"],
)
async def test_a_dead_client_is_found(base: Any, how: signal.Signals, within_s: float) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        tenant = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGS, listener.address, stdout=subprocess.PIPE
        )
        assert tenant.stdout is not None
        await asyncio.wait_for(tenant.stdout.readline(), 60)
        os.kill(tenant.pid, how)
        began = time.monotonic()
        await until(lambda: not executor.status()["clients"] and not listener.peers, within_s)  # type: ignore[attr-defined]
        assert time.monotonic() - began < within_s
        if how is signal.SIGSTOP:
            tenant.kill()
        await tenant.wait()


ENDS = """
import sys, torch, symbiosis
with symbiosis.open_model(sys.argv[1]) as model:
    model(torch.arange(3, 21).reshape(2, 9))
print("end of script")
"""


async def test_a_process_ends_in_good_order(base: Any) -> None:
    """gloo has threads of its own, which must not see the interpreter go down."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        for _ in range(3):
            tenant = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ENDS, listener.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, errors = await asyncio.wait_for(tenant.communicate(), 60)
            assert (tenant.returncode, out) == (0, b"end of script\n"), errors


async def test_an_executor_that_goes_again_at_once_is_asked_again(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the welcome and the first look at the connection."""
    address = f"dist://127.0.0.1:{free_port()}"
    async with symbiosis.Executor(copy.deepcopy(base)) as executor:
        await executor.listen(address, insecure=True)
        remote = symbiosis.connect(address, retry=30.0)
        await remote.__aenter__()
        client = await remote.client().open()
    real, left = Connection.ends, [2]

    def ends(self: Connection) -> tuple[str, str]:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionLostError("gone again")
        return real.fget(self)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Connection, "ends", property(ends))
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address, insecure=True)
        await asyncio.wait_for(client.forward(input_ids=IDS), 20)
        assert left[0] < 0
        await remote.close()


def children() -> set[int]:
    """Processes that this one has started, directly or not."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" ")
            parents[int(pid)] = int(rest.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in {os.getpid(), *found}} - found:
        found |= more
    return found


@pytest.mark.usefixtures("_not_held")
async def test_reconnects_pile_nothing_up(base: Any) -> None:
    """Lanes whose client does not come to the rendezvous end with its connection, not with gloo's patience."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        await until(lambda: children())
        before = children()
        with socket.create_server(("127.0.0.1", 0)) as mute:
            for number in range(5):
                with raw(listener.address) as mallory:
                    mallory.send(hello(f"mallory-{number}"))
                    assert (await in_thread(receive, mallory))[0] is Type.WELCOME
                    mallory.send(wire.pack(Type.RENDEZVOUS, 0, "", mute.getsockname()[1]))
                    assert (await in_thread(receive, mallory))[0] is Type.RENDEZVOUS
                    await until(lambda: len(children() - before) == 2)
                await until(lambda: not children() - before)
    await until(lambda: not children() & before)


async def test_lanes_that_outlast_their_connection_count(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "alive", True)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True, limits=Limits(clients=2))
        for number in range(3):
            with raw(listener.address) as mallory:
                mallory.send(hello(f"mallory-{number}"))
                assert (await in_thread(receive, mallory))[0] is Type.WELCOME
                mallory.send(a_call(1))
                type_, content = await in_thread(receive, mallory)
                assert (type_ is Type.ENDED and content[0] == "BusyError") == (number == 2)
            await until(lambda: not executor.status()["clients"])


VANDAL = """
import os, socket, sys, torch, symbiosis
opened = symbiosis.open_model(sys.argv[1])
model = opened.__enter__()
model(torch.arange(3, 21).reshape(2, 9))
port = int(sys.argv[1].rpartition(":")[2])
lanes = []
for name in os.listdir("/proc/self/fd"):
    try:
        found = socket.socket(fileno=os.dup(int(name)))
        if found.family == socket.AF_INET and port not in (found.getpeername()[1], found.getsockname()[1]):
            lanes.append(found)
    except OSError:
        pass
print(len(lanes), flush=True)
said = bytes.fromhex(sys.stdin.readline())
for lane in lanes:
    lane.setblocking(True)
    lane.sendall(said)
sys.stdin.read()
"""


def _preamble(*numbers: int) -> bytes:
    """gloo's: bytes, what it is, slot, offset, length, offset there."""
    return struct.pack("<6Q", *numbers)


NONSENSE = {
    "ones": b"\xff" * 4096,
    "no such operation": _preamble(48, 99, 0, 0, 0, 0) * 4,
    "longer than it is": _preamble(48 + 4096, 1, 0, 0, (1 << 64) - 8, 0) + b"A" * 4096,
    "not what was sent": _preamble(48 + 512, 1, 0, 0, 1 << 30, 0) + b"A" * 4096,
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_on_a_lane_ends_that_client_alone(base: Any, kind: str) -> None:
    """gloo ends the process that it runs in where it cannot make sense of what its peer says."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
            before = children()
            vandal = await asyncio.create_subprocess_exec(
                sys.executable, "-c", VANDAL, listener.address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert vandal.stdout is not None
            assert vandal.stdin is not None
            assert int(await asyncio.wait_for(vandal.stdout.readline(), 60)) >= 2
            hers = children() - before - {vandal.pid}
            assert len(hers) == 2
            vandal.stdin.write(NONSENSE[kind].hex().encode() + b"\n")
            if kind in ("longer than it is", "not what was sent"):  # what gloo does not survive
                await until(lambda: not hers & children())
            for _ in range(20):
                await alice.forward(input_ids=IDS)
            vandal.kill()
            await vandal.wait()
            await until(lambda: executor.status()["clients"] == ["alice"] and children() == before)
            await alice.forward(input_ids=IDS)


async def test_lanes_that_cannot_be_opened(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told, and the first lane does not stay behind when it is the second that fails."""
    real, failing = LaneProcess.__init__, [False]

    def fails(self: Any, number: int, *arguments: Any) -> None:
        if failing[0] and number == 1:
            raise OSError(24, "Too many open files")
        real(self, number, *arguments)

    monkeypatch.setattr(LaneProcess, "__init__", fails)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
            with raw(listener.address):
                pass  # the first one makes ZeroMQ's context, which stays
            before, open_before, failing[0] = children(), descriptors(), True
            for _ in range(4):  # a descriptor more or less may be ZeroMQ's; one for each of them would be ours
                with raw(listener.address) as mallory:
                    mallory.send(hello("mallory"))
                    await in_thread(receive, mallory)
                    mallory.send(a_call(1))
                    type_, content = await in_thread(receive, mallory)
                    assert (type_, content[0]) == (Type.ENDED, "BusyError")
                    assert "Too many open files" in content[1]
            try:
                await until(lambda: children() == before and descriptors() < open_before + 4)
            except TimeoutError:
                pytest.fail(f"processes {children()} after {before}, descriptors {descriptors()} after {open_before}")
            await alice.forward(input_ids=IDS)


def private_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Private_Dirty")).split()[1]) << 10
    return 0


async def test_a_lane_is_not_told_to_remember_without_end(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 bytes of gloo's are a note for which it takes memory of its own."""
    monkeypatch.setattr(lane_process, "_DATA_BYTES", 64 << 20)
    monkeypatch.setitem(NONSENSE, "notes", b"".join(_preamble(48, 2, 1 << 20 | n, 0, 16, 0) for n in range(1 << 20)))
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        vandal = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VANDAL, listener.address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert vandal.stdout is not None
        assert vandal.stdin is not None
        await asyncio.wait_for(vandal.stdout.readline(), 60)
        hers = children() - {vandal.pid}
        vandal.stdin.write(NONSENSE["notes"].hex().encode() + b"\n")
        most = 0
        for _ in range(200):
            await asyncio.sleep(0.05)
            for pid in hers:
                most = max(most, private_bytes(pid))
        assert most < 128 << 20
        vandal.kill()
        await vandal.wait()


@pytest.mark.usefixtures("_not_held")
async def test_listeners_share_the_process_that_forks(base: Any) -> None:
    """It ends with the last of them."""
    before = children()
    async with symbiosis.Executor(base, name="two") as two:
        second = await two.listen(LOCAL, insecure=True)
        forks = children() - before
        assert len(forks) == 1
        async with symbiosis.Executor(base, name="one") as one:
            first = await one.listen(LOCAL, insecure=True)
            assert children() - before == forks
            await first.close()  # and once more by its executor
        async with symbiosis.connect(second.address) as remote, remote.client() as client:
            await client.forward(input_ids=IDS)
            assert forks <= children()
        await second.close()
        await until(lambda: not children() - before)
        third = await two.listen(LOCAL, insecure=True)
        async with symbiosis.connect(third.address) as remote, remote.client() as client:
            await client.forward(input_ids=IDS)


@pytest.mark.usefixtures("_not_held")
async def test_the_process_that_forks_may_be_killed(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        before = children()
        listener = await executor.listen(LOCAL, insecure=True)
        forks = children() - before
        assert forks
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            await asyncio.wait_for(client.forward(input_ids=IDS), 20)


async def test_lanes_that_never_open_are_given_up(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages come through, tensors do not: that will not get better by asking again and again."""
    monkeypatch.setattr(rendezvous, "gloo", lambda *_: 1 / 0)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address, retry=60.0) as remote, remote.client() as client:
            with pytest.raises(BrokenError, match=r"torch\.distributed: division by zero"):
                await asyncio.wait_for(client.forward(input_ids=IDS), 40)


# --------------------------------------------------------------------------------------------------------------- lanes


async def _lanes() -> tuple[Lanes, Lanes, list[Note], list[Any]]:
    """Both sides, in one process."""
    sides: list[Lanes] = []
    notes: list[Note] = []
    lost: list[Any] = []

    def tell(other: int) -> Any:
        return lambda note: (notes.append(note), sides[other].met(note))

    sides += [
        Lanes("gloo", rank, CPU, "127.0.0.1", "127.0.0.1", tell(1 - rank), lost.append) for rank in (EXECUTOR, TENANT)
    ]
    return sides[0], sides[1], notes, lost


async def test_only_ports_travel() -> None:
    """What gloo says of itself would bring uninitialised memory to the other side, and crash it if it were no good."""
    executor, tenant, notes, _ = await _lanes()
    arrived = asyncio.Event()
    x, y = torch.randn(3), torch.empty(3)
    executor.receive([y], arrived.set)
    tenant.send([x])
    await asyncio.wait_for(arrived.wait(), 10)
    assert torch.equal(x, y)
    assert len(notes) == 4
    assert all(type(note.value) is int and note.key == "" for note in notes)
    executor.close()
    tenant.close()


async def test_a_lane_keeps_its_order_both_ways_at_once() -> None:
    executor, tenant, _, lost = await _lanes()
    count, size = 40, 100_000
    results: list[torch.Tensor] = []
    done = asyncio.Event()
    for number in range(count):
        up, down = torch.empty(size), torch.empty(size)
        tenant.send([torch.full((size,), float(number))])
        executor.receive([up], lambda up=up: executor.send([up * 2]))
        tenant.receive([down], lambda down=down: (results.append(down), len(results) == count and done.set()))
    await asyncio.wait_for(done.wait(), 20)
    assert [float(result[0]) for result in results] == [2.0 * number for number in range(count)]
    assert not lost
    executor.close()
    tenant.close()


def test_another_gloo_is_said_so() -> None:
    address = struct.pack("=HHI", socket.AF_INET, socket.htons(7000), 1).ljust(128, b"\0") + bytes(8)
    sound = struct.pack("<Q", 2) + b"vm" + struct.pack("<Q", 136) + address + bytes(16)
    assert sound[rendezvous._address_at(sound) :][:136] == address
    for wrong in (sound[:100], struct.pack("<Q", 1 << 60) + sound[8:], sound.replace(b"\x88", b"\x80", 1)):
        with pytest.raises(BrokenError, match="use tcp://"):
            rendezvous._address_at(wrong)


@pytest.mark.parametrize("content", [(), (0, "", 0), (2, "", 7), (0, "x" * 200, 7), (0, "", b"x" * 5000), (0, 1, 7)])
def test_a_rendezvous_is_checked(content: Any) -> None:
    with pytest.raises(WireError):
        wire.read_rendezvous(content)


# ------------------------------------------------------------------------------------------------------ hostile clients


BAD = {
    "frames": [a_call(1), rows()],
    "no rows": [a_call(1, 0)],
    "more rows than there are bytes in the world": [a_call(1, 1 << 62)],
    "an unknown layer": [a_call(1, 1, 99)],
    "bytes for a port": [wire.pack(Type.RENDEZVOUS, 0, "0", b"\xff" * 170)],
    "no port": [wire.pack(Type.RENDEZVOUS, 0, "", 1 << 20)],
    "no lane": [wire.pack(Type.RENDEZVOUS, 7, "", 7000)],
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_messages_end_that_client_alone(base: Any, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            with raw(listener.address) as mallory:
                mallory.send(hello("mallory"))
                assert (await in_thread(receive, mallory))[0] is Type.WELCOME
                mallory.send_multipart(BAD[what])
                type_, content = await in_thread(receive, mallory)
                assert type_ is Type.ENDED
                assert content[0] == "WireError"
                await until(lambda: executor.status()["clients"] == ["alice"])
            await alice.forward(input_ids=IDS)


MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(a_call, st.integers(0, 5), st.integers(0, 3), st.integers(0, 20)),
        st.builds(
            lambda lane, port: wire.pack(Type.RENDEZVOUS, lane, "", port), st.integers(0, 1), st.integers(1, 65535)
        ),
        st.builds(lambda type_, *rest: wire.pack(type_, *rest), st.sampled_from(Type), st.integers(-1, 3)),
    ),
    max_size=6,
)


async def test_garbage_disturbs_nobody(base: Any) -> None:
    """Calls whose tensors never come, ports where nobody listens, and worse."""
    with torch.no_grad():
        expected = base(IDS).logits
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)

        @settings(max_examples=50)
        @given(MESSAGES)
        def throw(messages: list[bytes]) -> None:
            with raw(listener.address) as mallory:
                for message in [hello("mallory"), *messages]:
                    mallory.send(message)
                receive(mallory)

        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            thrown = asyncio.create_task(in_thread(throw))
            while not thrown.done():
                out = await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
                torch.testing.assert_close(out.logits, expected)
            await thrown
            await until(lambda: executor.status()["clients"] == ["alice"])


async def test_garbage_at_the_port_of_a_lane(base: Any) -> None:
    """gloo's own port, opened for one client: whoever talks to it may cost that client its lane, and nothing else."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            with raw(listener.address) as mallory, socket.create_server(("127.0.0.1", 0)) as hers:
                mallory.send(hello("mallory"))
                await in_thread(receive, mallory)
                mallory.send(wire.pack(Type.RENDEZVOUS, 0, "", hers.getsockname()[1]))
                type_, content = await in_thread(receive, mallory)
                assert type_ is Type.RENDEZVOUS
                for seed in range(20):
                    with socket.create_connection(("127.0.0.1", content[2])) as visitor:
                        visitor.sendall(bytes([seed]) * (8 + 50 * seed))
                    await alice.forward(input_ids=IDS)


async def test_who_announces_and_does_not_send(base: Any) -> None:
    """Limits hold for what is announced: nothing is allocated beyond them."""
    limits = Limits(calls=4, arena_bytes=1 << 20)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True, limits=limits)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            with raw(listener.address) as mallory:
                mallory.send(hello("mallory"))
                await in_thread(receive, mallory)
                for id_ in range(3):
                    mallory.send(a_call(id_, 3000))
                await alice.forward(input_ids=IDS)
                while (answer := await in_thread(receive, mallory))[0] is Type.RENDEZVOUS:
                    pass
                assert answer[0] is Type.ENDED
                await until(lambda: executor.status()["clients"] == ["alice"])
            await alice.forward(input_ids=IDS)


async def test_a_client_of_ours_keeps_to_the_limits(base: Any) -> None:
    limits = Limits(calls=4, rows=64)
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        listener = await executor.listen(LOCAL, insecure=True, limits=limits)
        channel = await make_transport(listener.address).connect(listener.address, "greedy")
        x = torch.randn(20, 32)
        replies = [channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))) for _ in range(200)]
        results = await asyncio.wait_for(asyncio.gather(*replies), 30)
        assert all(torch.equal(result, results[0][0]) for (result,) in results)
        channel.close()


async def test_cancelled_on_its_way(base: Any) -> None:
    """A call that is cancelled while its tensors travel is answered once, and the lane goes on."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        channel = await make_transport(listener.address).connect(listener.address, "client")
        x = torch.randn(50_000, 32)
        for _ in range(5):
            call = Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))
            reply = channel.send(call)
            channel.cancel(call)
            small = channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x[:2],)))
            (result,) = await asyncio.wait_for(small, 20)
            torch.testing.assert_close(result, base.model.layers[0].self_attn.q_proj(x[:2]))
            assert not reply.done()
        await until(lambda: executor.status()["outstanding"] == 0)
        channel.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_training_leaves_nothing_behind(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        before = descriptors()
        async with symbiosis.connect(listener.address) as remote:
            for _ in range(3):
                async with remote.client(lora()) as client:
                    await client.train_step(BATCH, adamw(client.model))
        await until(lambda: not listener.peers and not listener.links)  # type: ignore[attr-defined]
        await until(lambda: descriptors() <= before)
