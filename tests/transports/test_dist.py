"""``dist://`` sends messages as ``tcp://`` does, and tensors by torch.distributed (gloo here; NCCL needs two GPUs)."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import BrokenError, ConnectionLostError, UsageError, WireError
from symbiosis.testing import tiny_model
from symbiosis.transports import dist, lanes, wire
from symbiosis.transports.blocking import ThreadedChannel
from symbiosis.transports.connection import joined
from symbiosis.transports.dist import LaneCarrier, LaneConnection, LaneCourier
from symbiosis.transports.keys import new_key
from symbiosis.transports.lanes import EXECUTOR, TENANT, Lanes
from symbiosis.transports.limits import Limits
from symbiosis.transports.tcp_client import AsyncTcpConnection
from symbiosis.transports.wire import Hello, Type
from tests.conftest import LANE
from tests.helpers import BATCH, IDS, adamw, in_thread, lora, until
from tests.service import Service, free_port, save_model
from tests.transports.raw import a_call, hello, raw, receive, rows, violate

LOCAL = "dist://127.0.0.1:0"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limit, so that lanes whose other side is gone end within the test."""
    monkeypatch.setattr(lanes, "WITHIN_S", 10.0)
    monkeypatch.setattr(lanes, "MEET_WITHIN_S", 3.0)  # five times that at most, which is enough for a busy machine


# ----------------------------------------------------------------------------------------------------------- addresses


async def test_ipv6(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("dist://[::1]:0", insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            output = await client.forward(input_ids=IDS)
            torch.testing.assert_close(output.logits, base(IDS).logits)


async def test_a_listener_requires_insecure(base: Any, tmp_path: Path) -> None:
    """This holds with keys and without: torch.distributed encrypts nothing, and trusts its peers."""
    new_key(tmp_path, "server")
    key = new_key(tmp_path, "alice")
    async with symbiosis.Executor(base) as executor:
        for address in ("dist://0.0.0.0:0", LOCAL):
            with pytest.raises(UsageError, match="encrypts nothing"):
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


# ------------------------------------------------------------------------------------------------------------- deaths


ENDS = """
import sys, torch, symbiosis
with symbiosis.open_model(sys.argv[1]) as model:
    model(torch.arange(3, 21).reshape(2, 9))
print("end of script")
"""


async def test_a_lane_waits_for_the_gpu_on_its_own_thread() -> None:
    event = Mock(query=Mock(side_effect=[False, False, True]))
    lanes._wait(event, 10.0)
    assert event.query.call_count == 3
    event = Mock(query=Mock(return_value=False))
    with pytest.raises(TimeoutError, match="has not sent or taken a matrix within 0 s"):
        lanes._wait(event, 0.01)


async def test_a_thread_for_synchronous_code_has_its_current_gpu(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    current.gpu = 3
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.gpu)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    async def fails() -> Any:
        raise ConnectionLostError("no executor")

    with pytest.raises(ConnectionLostError):
        ThreadedChannel(fails())
    assert chosen == [3]


@pytest.mark.thorough
async def test_a_process_ends_without_errors(base: Any) -> None:
    """gloo has threads of its own, which must not run during the shutdown of the interpreter."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)

        async def run() -> None:
            tenant = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ENDS, listener.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, errors = await asyncio.wait_for(tenant.communicate(), 60)
            assert (tenant.returncode, out) == (0, b"end of script\n"), errors

        await asyncio.gather(run(), run(), run())


async def test_a_client_joins_again_after_a_loss_directly_after_the_welcome(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between the welcome and its first use."""
    address = f"dist://127.0.0.1:{free_port()}"
    async with symbiosis.Executor(copy.deepcopy(base)) as executor:
        await executor.listen(address, insecure=True)
        remote = symbiosis.connect(address, retry=30.0)
        await remote.__aenter__()
        client = await remote.client().open()
    real, left = AsyncTcpConnection.local_ip, [2]

    def local_ip(self: AsyncTcpConnection) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionLostError("gone again")
        return real(self)

    monkeypatch.setattr(AsyncTcpConnection, "local_ip", local_ip)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address, insecure=True)
        await asyncio.wait_for(client.forward(input_ids=IDS), 20)
        assert left[0] < 0
        await remote.close()


LeftLanes = dict[threading.Thread, str]


def lane_threads(left: LeftLanes) -> int:
    """Return the number of threads of lanes, without those of earlier tests."""
    return sum(thread.name == LANE and thread not in left for thread in threading.enumerate())


async def test_reconnects_leave_no_lanes_behind(base: Any, lanes_left: LeftLanes) -> None:
    """Lanes whose client does not come to the rendezvous end with its connection, before the time limit."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        for number in range(5):
            with raw(listener.address) as absent:
                absent.send(hello(f"absent-{number}"))
                assert (await in_thread(receive, absent))[0] is Type.WELCOME
                absent.send(a_call(1))
                assert (await in_thread(receive, absent))[0] is Type.RENDEZVOUS
                assert lane_threads(lanes_left) == 2
            await until(lambda: lane_threads(lanes_left) == 0, 5)


SENDS = """
import sys, torch
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
channel = make_transport(sys.argv[1]).connect_blocking(sys.argv[1], "victim")
x = torch.randn(400_000, 32)
while True:
    channel.call(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,)))
    print("called", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.02, marks=pytest.mark.thorough), 0.05])
async def test_a_client_killed_in_the_middle_of_a_matrix(base: Any, delay_s: float, lanes_left: LeftLanes) -> None:
    """gloo in the executor's process survives a peer that dies while it sends 50 MB; other clients are served."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            victim = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SENDS, listener.address, stdout=subprocess.PIPE
            )
            assert victim.stdout is not None
            await asyncio.wait_for(victim.stdout.readline(), 60)
            await asyncio.sleep(delay_s)
            victim.kill()
            await victim.wait()
            for _ in range(5):
                await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
            await until(lambda: executor.status()["clients"] == ["alice"])
        await until(lambda: lane_threads(lanes_left) == 0, 20)


async def test_lanes_that_never_open_are_given_up(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages arrive and tensors do not, and further attempts would not change that."""
    monkeypatch.setattr(lanes, "gloo", lambda *_: 1 / 0)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address, retry=60.0) as remote, remote.client() as client:
            with pytest.raises(BrokenError, match=r"torch\.distributed: division by zero"):
                await asyncio.wait_for(client.forward(input_ids=IDS), 40)


# --------------------------------------------------------------------------------------------------------------- lanes


async def _lanes() -> tuple[Lanes, Lanes, list[Any]]:
    """Both sides of a lane, in one process."""
    sides: list[Lanes] = []
    lost: list[Any] = []

    def tell(other: int) -> Any:
        return lambda message: sides[other].met(*wire.read_rendezvous(wire.unpack(message)[1]))

    sides += [Lanes("gloo", rank, CPU, "127.0.0.1", tell(1 - rank), lost.append) for rank in (EXECUTOR, TENANT)]
    return sides[0], sides[1], lost


async def test_lanes_that_cannot_be_opened(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets an error, and the first lane is closed when the system has no thread for the second."""
    real, started = threading.Thread.start, []

    def fails(self: threading.Thread) -> None:
        if self.name == "symbiosis-dist":
            started.append(self)
            if len(started) % 2 == 0:
                raise RuntimeError("can't start new thread")
        real(self)

    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
            monkeypatch.setattr(threading.Thread, "start", fails)
            for _ in range(3):
                with raw(listener.address) as mallory:
                    mallory.send(hello("mallory"))
                    await in_thread(receive, mallory)
                    mallory.send(a_call(1))
                    type_, content = await in_thread(receive, mallory)
                    assert (type_, content[0]) == (Type.ENDED, "BusyError")
                    assert "can't start new thread" in content[1]
            monkeypatch.undo()
            await until(lambda: not any(thread.is_alive() for thread in started))
            await alice.forward(input_ids=IDS)


async def test_a_rendezvous_needs_no_port_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups exchange all their data for the rendezvous as notes."""
    sent: list[Any] = []
    real = Lanes.met
    monkeypatch.setattr(Lanes, "met", lambda self, *note: (sent.append(note), real(self, *note)))
    executor, tenant, _ = await _lanes()
    arrived = asyncio.Event()
    x, y = torch.randn(3), torch.empty(3)
    executor.receive([y], arrived.set)
    tenant.send([x])
    await asyncio.wait_for(arrived.wait(), 10)
    assert torch.equal(x, y)
    assert {lane for lane, _, _ in sent} == {0, 1}
    executor.close()
    tenant.close()


async def test_a_lane_keeps_its_order_in_both_directions_at_once() -> None:
    executor, tenant, lost = await _lanes()
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


@pytest.mark.parametrize(
    "content",
    [
        (), (0, "", 0), (2, "", b"7"), (0, "x" * 200, b"7"), (0, "", b"x" * 5000), (0, 1, b"7"), (0, "", "7"),
        (0, "0/1", b""),
    ],
)  # fmt: skip
def test_a_rendezvous_is_checked(content: Any) -> None:
    with pytest.raises(WireError):
        wire.read_rendezvous(content)


VALUE = b"".join([(2).to_bytes(8, "little"), b"vm", (136).to_bytes(8, "little"), bytes(136 + 16)])
NOT_OF_GLOO = {
    "empty": ("0/1", b""),
    "one byte": ("0/1", b"x"),
    "no lengths": ("0/1", b"\xff" * 4096),
    "a short address": ("0/1", VALUE[:-17]),
    "more behind it": ("0/1", VALUE + b"x"),
    "a long name": ("0/1", (1 << 62).to_bytes(8, "little") + VALUE[8:]),
    "the other side's key": ("0/0", VALUE),
    "another key": ("x", VALUE),
}


@pytest.mark.parametrize("what", NOT_OF_GLOO)
def test_values_that_gloo_does_not_write(what: str) -> None:
    lanes.check_gloo("0/1", VALUE, TENANT)
    with pytest.raises(WireError):
        lanes.check_gloo(*NOT_OF_GLOO[what], TENANT)


@pytest.mark.thorough
def test_an_executor_survives_values_that_gloo_does_not_write(tmp_path: Path) -> None:
    """An empty value ended the process, and values with ever new keys filled its memory."""
    checkpoint = save_model(tmp_path / "model")
    port, shm = free_port(), f"shm://{tmp_path}/s.sock"
    options = ("--listen", f"dist://127.0.0.1:{port}", "--insecure")
    with Service(checkpoint, shm, *options, log=tmp_path / "service.log", fresh=True) as service:
        for key, value in NOT_OF_GLOO.values():
            with raw(f"tcp://127.0.0.1:{port}") as mallory:
                mallory.send(hello("mallory"))
                mallory.receive()
                mallory.send(wire.pack(Type.RENDEZVOUS, 0, key, value))
                while (answer := mallory.receive())[0] is Type.RENDEZVOUS:
                    pass
                assert (answer[0], answer[1][0]) == (Type.ENDED, "WireError")
        time.sleep(0.5)  # gloo reads on a thread
        assert make_transport(shm).look(shm).status["clients"] == []
        assert service.stop() == 0


VICTIM = """
import sys, symbiosis, torch
from symbiosis.errors import SymbiosisError
try:
    with symbiosis.open_model(sys.argv[1], retry=0) as model:
        model(torch.tensor([[1]]))
except SymbiosisError as error:
    print(type(error).__name__)
"""


@pytest.mark.thorough
async def test_a_client_survives_values_that_gloo_does_not_write(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: Lanes, lane: int, key: str, value: bytes) -> None:
        self.rendezvous(wire.pack(Type.RENDEZVOUS, lane, key, b""))

    monkeypatch.setattr(Lanes, "_publish", publish)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        victim = [sys.executable, "-c", VICTIM, listener.address]
        result = await in_thread(partial(subprocess.run, victim, capture_output=True, text=True, timeout=60))
        assert (result.returncode, result.stdout) == (0, "WireError\n"), result.stderr


async def test_lanes_of_other_backends_take_a_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, tenant, _ = await _lanes()
    executor.backend = "nccl"
    monkeypatch.setattr(lanes, "MOST_VALUES", 0)
    with pytest.raises(WireError, match="values of a rendezvous"):
        executor.met(0, "0", b"7")
    executor.close()
    tenant.close()


# ------------------------------------------------------------------------------------------------------ broken messages


BAD = {
    "frames": [a_call(1), rows()],
    "no rows": [a_call(1, 0)],
    "more rows than there are bytes in the world": [a_call(1, 1 << 62)],
    "an unknown layer": [a_call(1, 1, 99)],
    "a number for a value": [wire.pack(Type.RENDEZVOUS, 0, "", 1 << 20)],
    "no lane": [wire.pack(Type.RENDEZVOUS, 7, "", b"")],
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_messages_end_the_connection_of_that_client_only(base: Any, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await violate(listener.address, *BAD[what])
            await until(lambda: executor.status()["clients"] == ["alice"])
            await alice.forward(input_ids=IDS)


MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(a_call, st.integers(0, 5), st.integers(0, 3), st.integers(0, 20)),
        st.builds(lambda type_, *rest: wire.pack(type_, *rest), st.sampled_from(Type), st.integers(-1, 3)),
    ),
    max_size=6,
)


async def test_malformed_messages_affect_no_other_client(base: Any) -> None:
    """The client sends calls whose tensors never arrive, and malformed messages."""
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


async def test_a_client_that_announces_tensors_and_never_sends_them(base: Any) -> None:
    """Limits apply to announced tensors: no memory is allocated beyond the limits."""
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


class Silent:
    """Receives messages, and takes no results."""

    def __init__(self, carrier: LaneCarrier) -> None:
        self.carrier = carrier
        self.answered = False

    def received(self, type_: Type, content: Any, attached: Any) -> None:
        if type_ is Type.RENDEZVOUS:
            self.carrier.control(type_, content)
        else:
            self.answered = True

    def lost(self, error: Any) -> None:
        pass

    def arrived(self, pending: Any, outcome: Any) -> None:
        pass


async def test_results_count_until_their_lane_has_let_go_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the connection has ended: the lane's thread waits until its time limit."""
    monkeypatch.setattr(lanes, "WITHIN_S", 4.0)
    model = tiny_model(vocab_size=32_000, num_hidden_layers=1)
    async with symbiosis.Executor(model) as executor:
        listener: Any = await executor.listen(LOCAL, insecure=True)
        join = partial(LaneConnection, [], listener.address, key=None, insecure=True)
        mallory = await joined(join, Hello("mallory"), False)
        assert isinstance(mallory.carrier, LaneCarrier)
        silent = Silent(mallory.carrier)
        mallory.start(silent)
        head, n = mallory.welcome.layers[-1].layer, 256
        mallory.carrier._lanes.send([torch.ones(n, 32)])
        mallory.send([a_call(1, n, head)])
        await until(lambda: silent.answered, 20)
        mallory._transport.abort()  # its lanes stay open
        await until(lambda: not listener.lines)
        budget = executor.service.budget
        assert budget.held > 4 * n * 32_000
        await until(lambda: budget.held == 0, 20)
        mallory.close()


def test_no_memory_for_the_tensors_of_a_call_ends_the_connection() -> None:
    """Its client, which waits for the answer, joins again."""
    line, tensor = Mock(), Mock(to=Mock(side_effect=RuntimeError("out of memory")))
    LaneCourier("gloo", line)._arrived(Mock(), (tensor,))
    line.drop.assert_called_once_with("there is no memory for its call: out of memory")
    line.peer.arrived.assert_not_called()


async def test_no_memory_for_results_ends_that_call_alone(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results stay on their lane, so the next call, which must not get them, needs another one."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, insecure=True)
        channel = await make_transport(listener.address).connect(listener.address, "client")
        key, x, y = Key((channel.layers[-1].layer,), Pass.FORWARD), torch.randn(4, 32), torch.randn(4, 32)
        real, failures = dist._empty, [RuntimeError("out of memory")]

        def empty(rows: int, columns: Any, device: torch.device) -> Any:
            if columns[0][0] == base.lm_head.out_features and failures:
                raise failures.pop()
            return real(rows, columns, device)

        monkeypatch.setattr(dist, "_empty", empty)
        replies = [channel.send(Call(key, Kind.FINETUNE, (rows,))) for rows in (x, y)]
        results = await asyncio.wait_for(asyncio.gather(*replies, return_exceptions=True), 20)
        assert [str(result) for result in results if isinstance(result, RuntimeError)] == ["out of memory"]
        for rows, result in zip((x, y), results, strict=True):  # those of the second call may arrive first
            if not isinstance(result, RuntimeError):
                torch.testing.assert_close(result, (base.lm_head(rows),))
        channel.close()


async def test_a_regular_client_keeps_to_the_limits(base: Any) -> None:
    limits = Limits(calls=4, rows=64)
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        listener = await executor.listen(LOCAL, insecure=True, limits=limits)
        channel = await make_transport(listener.address).connect(listener.address, "greedy")
        x = torch.randn(20, 32)
        replies = [channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))) for _ in range(200)]
        results = await asyncio.wait_for(asyncio.gather(*replies), 30)
        assert all(torch.equal(result, results[0][0]) for (result,) in results)
        channel.close()


async def test_cancelled_during_the_transfer(base: Any) -> None:
    """A call that is cancelled while its tensors are sent is answered once, and the lane can be used afterwards."""
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
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]
        await until(lambda: descriptors() <= before + 1)  # the file with the share
