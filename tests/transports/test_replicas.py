"""Several addresses of one model: choice, failover, moves between walks, and errors."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import get_peft_model

import symbiosis
from symbiosis.core.registry import addresses_in, make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Look
from symbiosis.errors import (
    BusyError,
    ConnectionLostError,
    PrivacyError,
    RefusedError,
    SymbiosisError,
    UnknownNameError,
    UsageError,
)
from symbiosis.executor.load import RecentLoad
from symbiosis.privacy import SecretShares
from symbiosis.testing import Job, run_job, run_job_plain, tiny_model
from symbiosis.transports import addresses as address_lists
from symbiosis.transports import choice as choices_of_replicas
from symbiosis.transports import replicas
from symbiosis.transports.addresses import Addresses, Replica
from symbiosis.transports.choice import Choice, ranked
from symbiosis.transports.keys import new_key
from symbiosis.transports.limits import Limits
from tests.helpers import IDS, METHODS, assert_close, command, in_thread, lora, losses, until
from tests.service import Service, free_port, save_model
from tests.transports.test_chaos import Tenant

JOB = Job(steps=6)


@asynccontextmanager
async def two(folder: Path, seeds: tuple[int, int] = (0, 0)) -> AsyncIterator[tuple[Any, Any, str]]:
    """Two executors in this process, and their addresses: ``shm://`` and ``tcp://``."""
    one, other = (symbiosis.Executor(tiny_model(seed=seed)) for seed in seeds)
    async with one, other:
        await one.listen(f"shm://{folder}/one.sock")
        listener = await other.listen("tcp://127.0.0.1:0")
        yield one, other, f"shm://{folder}/one.sock,{listener.address}"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Service, Service, str]]:
    """Two executors in processes of their own, and their addresses."""
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=2)
    addresses = f"shm://{tmp_path}/one.sock", f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        one, other = (stack.enter_context(Service(checkpoint, address)) for address in addresses)
        yield one, other, ",".join(addresses)


@pytest.mark.parametrize("method", ["lora", "ia3", "prefix"])
async def test_a_client_goes_on_at_another_replica(method: str, tmp_path: Path) -> None:
    expected = run_job_plain(tiny_model(), METHODS[method]("llama"), JOB)
    async with two(tmp_path) as (one, other, addresses), symbiosis.connect(addresses) as base:
        async with base.client(METHODS[method]("llama"), seed=0) as client:
            job = asyncio.create_task(run_job(client, JOB))
            await until(lambda: one.statistics().requests > 40)
            assert not other.statistics().requests, "the first address is preferred while both are idle"
            await one.close()
            assert_close(await job, expected)
        assert other.statistics().requests


@pytest.mark.parametrize("lost", [False, True])
async def test_a_replica_is_avoided_if_it_was_lost_and_not_after_ctrl_c(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Replica] = []
    monkeypatch.setattr(Choice, "failed", lambda choice, replica: failed.append(replica))
    call = Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.ones(1, 32),))
    error = ConnectionLostError("reset") if lost else KeyboardInterrupt()

    def receive() -> Any:
        raise error

    async with two(tmp_path) as (_, _, addresses):

        def work() -> None:
            channel: Any = make_transport(addresses).connect_blocking(addresses, "a")
            monkeypatch.setattr(channel._connection, "receive", receive)
            try:
                channel.call(call)
            except KeyboardInterrupt:
                channel.call(call)
            channel.close()

        await in_thread(work)
    assert len(failed) == lost


async def test_clients_that_have_joined_at_different_replicas_decode_jointly(tmp_path: Path) -> None:
    """Their shares of the model are one."""
    async with two(tmp_path) as (one, other, addresses), symbiosis.connect(addresses) as base:
        async with base.client(lora(), name="alice", seed=0) as alice:
            await alice.forward(input_ids=IDS)
            assert one.statistics().requests
            await one.close()
            async with base.client(lora(), name="bob", seed=1) as bob:
                options: Any = {"input_ids": IDS[:1], "max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
                await asyncio.gather(alice.generate(**options), bob.generate(**options))
        assert other.statistics().requests
        assert all(base.walks()[name]["joint"] > 12 for name in ("alice", "bob")), base.walks()


async def test_two_open_clients_with_one_name_are_refused_although_each_replica_has_one(tmp_path: Path) -> None:
    async with two(tmp_path) as (_, _, addresses), symbiosis.connect(addresses) as base:
        clients = [base.client(name="alice") for _ in range(3)]
        first, second = await asyncio.gather(*(client.open() for client in clients[:2]), return_exceptions=True)
        assert first is clients[0]
        assert isinstance(second, BusyError)
        with pytest.raises(BusyError, match="'alice' is open already"):
            await clients[2].open()
        assert base._clients == [first], "those that could not be opened are not kept"
        await clients[0].close()
        async with clients[2]:
            await clients[2].forward(input_ids=IDS)


def test_a_replica_that_is_killed_within_a_step_costs_nothing(services: tuple[Service, Service, str]) -> None:
    """Losses are equal to the last bit, and the client does not wait for the replica that was killed."""
    one, other, addresses = services

    def train(at: int, then: Any = None) -> list[float]:
        with symbiosis.open_model(addresses, retry=60) as model:
            torch.manual_seed(0)
            return losses(get_peft_model(model, lora()), 8, at, then)

    undisturbed = train(-1)
    assert train(3, one.kill) == undisturbed
    assert train(-1) == undisturbed, "a new client joins the other replica"
    one.start()
    assert train(3, other.kill) == undisturbed
    one.kill()
    began = time.monotonic()
    with pytest.raises(ConnectionLostError, match=r"no executor answers on shm://.*no executor answers on tcp://"):
        train(-1)
    assert time.monotonic() - began < 30


def test_without_a_replica_a_client_ends_after_its_patience(services: tuple[Service, Service, str]) -> None:
    one, other, addresses = services
    with symbiosis.open_model(addresses, retry=1) as model:
        model(IDS)
        one.kill()
        other.kill()
        began = time.monotonic()
        with pytest.raises(ConnectionLostError, match=r"did not come back within 1 s: .*shm://.*tcp://"):
            model(IDS)
        assert 1 <= time.monotonic() - began < 10
        with pytest.raises(ConnectionLostError):
            model(IDS)


@pytest.mark.parametrize("kind", ["coroutine", "blocking"])
async def test_a_client_moves_between_two_walks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its replica is crowded, it goes to the other one, and its results stay the same."""
    monkeypatch.setattr(address_lists, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(choices_of_replicas, "CROWDED", 0.1)
    config = lora()
    async with two(tmp_path) as (one, other, addresses):
        crowded = one.service._engine.counters.load
        monkeypatch.setattr(
            RecentLoad, "at", lambda load, now: 0.9 if load is crowded and one.statistics().requests else 0.0
        )
        monkeypatch.setattr(Choice, "candidates", first_then_other(addresses))
        if kind == "coroutine":
            async with symbiosis.connect(addresses) as base, base.client(config, seed=0) as client:
                outcome = await run_job(client, Job(steps=60))
        else:

            def work() -> Any:
                with symbiosis.open_model(addresses) as model:
                    return run_job_plain(model, config, Job(steps=60))

            outcome = await in_thread(work)
        assert one.statistics().requests
        assert other.statistics().requests
        assert_close(outcome, run_job_plain(tiny_model(), config, Job(steps=60)))


def first_then_other(addresses: str) -> Any:
    """Return a method in place of ``Choice.candidates`` that prefers the first address once, then the second one."""

    def candidates(choice: Any) -> list[Replica]:
        found = choice._addresses.replicas
        return list(found) if choice._replica is None else list(reversed(found))

    return candidates


def test_addresses_are_separated_by_commas_and_spaces() -> None:
    assert addresses_in("shm:///a, tcp://b:1,shm:///c,d") == ["shm:///a", "tcp://b:1", "shm:///c,d"]


def test_the_busiest_replica_with_room_is_preferred() -> None:
    one, two_, three, four = (Replica(name, None) for name in "abcd")  # type: ignore[arg-type]
    assert ranked({one: 0.0, two_: 0.3, three: 0.9, four: 0.6}) == [two_, one, four, three]
    assert ranked({one: 0.0, two_: 0.0}) == [one, two_]


def test_clients_of_a_crowded_replica_divide(tmp_path: Path) -> None:
    """Of many clients, about half go to an idle replica. Each look is judged once."""
    chances = iter([0.1, 0.6, 0.4, 0.9])
    several = Addresses(f"shm://{tmp_path}/a,shm://{tmp_path}/b")
    several._looked = time.monotonic() + 1e9  # no look but the one below
    here, there = several.replicas
    choices = [Choice(several, "model", {}, chance=lambda: next(chances)) for _ in range(4)]
    for choice in choices:
        choice._replica = here
        assert not choice.better()
    several.seen = seen({here: 0.9, there: 0.0})
    assert [choice.better() for choice in choices] == [True, False, True, False]
    assert not any(choice.better() for choice in choices)
    for loads in ({here: 0.4, there: 0.0}, {here: 0.9, there: 0.6}, {here: 0.9}):
        several.seen = seen(loads)
        choice = Choice(several, "model", {}, chance=lambda: 0.0)
        choice._replica = here
        assert not choice.better()
    several.seen = {**seen({here: 0.9}), **seen({there: 0.0}, "another part of the model")}
    choice = Choice(several, "model", {}, chance=lambda: 0.0)
    choice._replica = here
    assert not choice.better(), "executors of other parts do not count"


def seen(loads: dict[Replica, float], fingerprint: str = "model") -> dict[Replica, Any]:
    """Return what a look at replicas with these loads shows."""
    return {replica: Look({"load": load}, {"fingerprint": fingerprint}, {}) for replica, load in loads.items()}


@pytest.mark.parametrize("load", [math.nan, -1.0, True, "much", None, 10**400])
def test_a_replica_with_an_impossible_load_is_used(load: Any, tmp_path: Path) -> None:
    several = Addresses(f"shm://{tmp_path}/a,shm://{tmp_path}/b")
    replica, _ = several.replicas
    assert Choice(several, "model", seen({replica: load})).candidates() == [replica]


async def test_a_replica_with_smaller_limits_is_passed_over(tmp_path: Path) -> None:
    """Otherwise a call that the first replica takes would end the client at the second one."""
    model = tiny_model()
    async with symbiosis.Executor(model) as one, symbiosis.Executor(model) as small, symbiosis.Executor(model) as other:
        addresses = [f"shm://{tmp_path}/{name}.sock" for name in ("one", "small", "other")]
        await one.listen(addresses[0])
        await small.listen(addresses[1], limits=Limits(rows=8))
        await other.listen(addresses[2])
        async with symbiosis.connect(",".join(addresses)) as base, base.client() as client:
            expected = (await client.forward(input_ids=IDS)).logits
            await one.close()
            torch.testing.assert_close((await client.forward(input_ids=IDS)).logits, expected)
        assert not small.statistics().requests
        async with symbiosis.connect(",".join(addresses[1:]), retry=1.0) as base, base.client() as client:
            with pytest.raises(UsageError, match="the executor allows 8"):  # it was joined first
                await client.forward(input_ids=IDS)


async def test_a_replica_with_smaller_limits_is_not_joined_while_another_may_return(tmp_path: Path) -> None:
    model = tiny_model()
    addresses = [f"shm://{tmp_path}/{name}.sock" for name in ("one", "small")]
    async with symbiosis.Executor(model) as one, symbiosis.Executor(model) as small:
        await one.listen(addresses[0])
        await small.listen(addresses[1], limits=Limits(rows=8))
        async with symbiosis.connect(",".join(addresses)) as base, base.client() as client:
            expected = (await client.forward(input_ids=IDS)).logits
            await one.close()
            again = asyncio.create_task(client.forward(input_ids=IDS))
            await asyncio.sleep(0.5)
            async with symbiosis.Executor(model) as returned:
                await returned.listen(addresses[0])
                torch.testing.assert_close((await again).logits, expected)
        assert not small.statistics().requests


@pytest.mark.parametrize("rows", [1024, 8])
async def test_a_client_goes_on_if_all_replicas_were_given_smaller_limits(rows: int, tmp_path: Path) -> None:
    """It joins the one with the largest limits. A call that is too large for them is an error of its own."""
    async with two(tmp_path) as (one, other, addresses), symbiosis.connect(addresses) as base, base.client() as client:
        expected = (await client.forward(input_ids=IDS)).logits
        one.limit(Limits(rows=4), 1 << 30)
        other.limit(Limits(rows=rows), 1 << 30)
        listener: Any = one.service.listeners[-1]
        for line in list(listener.lines):
            line.drop("test")
        if rows == 8:
            with pytest.raises(UsageError, match="the executor allows 8"):
                await client.forward(input_ids=IDS)
        else:
            torch.testing.assert_close((await client.forward(input_ids=IDS)).logits, expected)
        small = (await client.forward(input_ids=IDS[:1, :2])).logits
        assert small.shape[1] == 2
        assert other.service.clients


async def test_a_fingerprint_of_another_executor_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that states the fingerprint of another one, with another layer table, is not used."""
    for place in (0, 1):
        async with two(tmp_path) as (one, other, addresses):
            liar = (one, other)[place]
            described = liar.service.share().description
            described["layers"][0][3] += 1  # type: ignore[index]
            expected = (tiny_model()(IDS)).logits
            async with symbiosis.connect(addresses) as base, base.client() as client:
                torch.testing.assert_close((await client.forward(input_ids=IDS)).logits, expected)
                status = (await base.status())["replicas"]
            assert "does not match its fingerprint" in status[addresses_in(addresses)[place]]["error"]
            assert not liar.statistics().requests


async def test_a_silent_replica_delays_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts connections and never answers."""
    for module in (address_lists, replicas):
        monkeypatch.setattr(module, "SHOWN_WITHIN_S", 0.5)
    async with two(tmp_path) as (_, _, addresses):
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(f"{tmp_path}/silent.sock")
            silent.listen()
            began = time.monotonic()
            async with symbiosis.connect(f"shm://{tmp_path}/silent.sock,{addresses}") as base:
                async with base.client() as client:
                    await client.forward(input_ids=IDS)
            assert time.monotonic() - began < 10


async def test_a_silent_replica_does_not_hide_one_that_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (address_lists, replicas):
        monkeypatch.setattr(module, "SHOWN_WITHIN_S", 0.5)
    address = f"shm://{tmp_path}/one.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent.sock")
        silent.listen(64)
        async with symbiosis.Executor(tiny_model()) as one:
            await one.listen(address)
            base = symbiosis.connect(f"{address},shm://{tmp_path}/silent.sock")
            client = base.client()
            await base.__aenter__()
            await client.open()
            expected = (await client.forward(input_ids=IDS)).logits
        began = time.monotonic()
        forward = asyncio.create_task(client.forward(input_ids=IDS))
        await asyncio.sleep(1)
        async with symbiosis.Executor(tiny_model()) as again:
            await again.listen(address)
            torch.testing.assert_close((await forward).logits, expected)
            assert time.monotonic() - began < 15
            await base.close()


async def test_executors_that_answer_late_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for if none has answered, as they are by those that join."""
    looks = Addresses.looks

    def late(self: Addresses, patience_s: float | None = None) -> Any:
        found = looks(self, patience_s)
        return found if patience_s is None else dict.fromkeys(found, ConnectionLostError("late"))

    async with two(tmp_path) as (_, _, addresses):
        monkeypatch.setattr(Addresses, "looks", late)
        shown = await in_thread(make_transport(addresses).look, addresses)
        assert [state["clients"] for state in shown.status["replicas"].values()] == [[], []]


async def test_replicas_of_different_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_S", 20.0)
    async with two(tmp_path, (0, 1)) as (one, other, addresses):
        for join in (
            lambda: in_thread(make_transport(addresses).look, addresses),
            lambda: in_thread(make_transport(addresses).connect_blocking, addresses, "client"),
            lambda: make_transport(addresses).connect(addresses, "client"),
        ):
            with pytest.raises(
                RefusedError, match=r"shm://.* and tcp://.* different models .*: their client weights differ"
            ):
                await join()
        assert not one.status()["clients"] + other.status()["clients"]


async def test_a_replica_with_another_model_is_passed_over(tmp_path: Path) -> None:
    """One that comes back with other weights gets no call. If no other is left, the client ends."""
    async with two(tmp_path) as (one, other, addresses):
        channel = await make_transport(addresses).connect(addresses, "client")
        wrong = symbiosis.Executor(tiny_model(seed=1))
        await one.close()
        async with wrong:
            await wrong.listen(addresses_in(addresses)[0])
            await until(lambda: other.status()["clients"])
            assert not wrong.status()["clients"]
            await other.close()
            worse = symbiosis.Executor(tiny_model(seed=2))
            async with worse:
                await worse.listen(addresses_in(addresses)[1])
                key = Key((0,), Pass.FORWARD)
                with pytest.raises(RefusedError, match=r"came back with another model"):
                    await asyncio.wait_for(channel.send(Call(key, Kind.DECODE, (torch.ones(1, 32),))), 20)
        channel.close()


async def test_one_silent_address_does_not_matter(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, _, addresses):
        some = f"shm://{tmp_path}/nobody.sock,{addresses}"
        async with symbiosis.connect(some) as base, base.client(lora(), seed=0) as client:
            assert_close(await run_job(client, JOB), run_job_plain(tiny_model(), lora(), JOB))
            status = (await base.status())["replicas"]
        assert "no executor answers" in status[f"shm://{tmp_path}/nobody.sock"]["error"]
        assert one.statistics().requests
        shown = await in_thread(command, "status", some, "--json")
        assert (shown.exit_code, list(json.loads(shown.stdout)["replicas"])) == (1, addresses_in(some))
        assert (await in_thread(command, "status", addresses, "--json")).exit_code == 0
        table = (await in_thread(command, "status", some)).stdout
        assert all(text in table.replace("\n", "") for text in ("nobody.sock", "error", "load"))


async def test_checks_hold_for_each_replica(tmp_path: Path) -> None:
    """A client whose rows are split between two executors never sends both parts to one of them."""
    model = tiny_model()
    async with two(tmp_path) as (one, other, addresses):
        third = symbiosis.Executor(copy.deepcopy(model))
        async with third:
            spare = await third.listen(f"shm://{tmp_path}/third.sock")
            second = addresses_in(addresses)[1]
            several = f"{addresses_in(addresses)[0]},{second},{spare.address}"
            scheme = SecretShares(with_=second)
            async with symbiosis.connect(several, retry=2.0) as base, base.client(privacy=scheme) as client:
                expected = await client.forward(input_ids=IDS)
                await one.close()
                torch.testing.assert_close(
                    (await client.forward(input_ids=IDS)).logits, expected.logits, atol=1e-3, rtol=0
                )
                assert [len(each.status()["clients"]) for each in (other, third)] == [1, 1]
                await third.close()
                with pytest.raises((PrivacyError, ConnectionLostError), match=r"same executor|did not come back"):
                    await client.forward(input_ids=IDS)


async def test_addresses_in_a_file_that_changes(tmp_path: Path) -> None:
    """Executors that are added to the file are used. A mistake in it changes nothing for clients that run."""
    file = tmp_path / "addresses"
    expected = run_job_plain(tiny_model(), lora(), JOB)
    with pytest.raises(UsageError, match=r"cannot read the addresses in .*No such file"):
        make_transport(f"file://{file}")
    file.write_text("# none yet\n")
    with pytest.raises(UsageError, match="has no address"):
        make_transport(f"file://{file}")
    async with two(tmp_path) as (one, other, addresses):
        first, second = addresses_in(addresses)
        file.write_text(f"# executors\n{first}\n")
        async with symbiosis.connect(f"file://{file}") as base, base.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, JOB))
            await until(lambda: one.statistics().requests > 20)
            for nonsense in ("nonsense", "tcp://127.0.0.1", f"{first}\nshm://relative", "tcp://a:b", ""):
                file.write_text(nonsense)
                await in_thread(base._transport._addresses.looks)  # type: ignore[attr-defined]
                assert [one.address for one in base._transport._addresses.replicas] == [first]  # type: ignore[attr-defined]
            file.write_text(f"{first}\n\n{second}  # the new one\n")
            await one.close()
            assert_close(await job, expected)
        assert other.statistics().requests


async def test_addresses_from_a_server(tmp_path: Path) -> None:
    """A server's list is read again when an executor is lost. Clients that run do not notice a server that fails."""
    expected = run_job_plain(tiny_model(), lora(), JOB)
    answer = {"status": 503, "text": ""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.end_headers()
            self.wfile.write(answer["text"].encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor() as pool:
        pool.submit(server.serve_forever, 0.05)
        address = f"http://127.0.0.1:{server.server_port}/llama"
        for status, text, why in ((503, "", "503"), (200, "# none", "has no address"), (200, "dist://h:1", "can be")):
            answer.update(status=status, text=text)
            with pytest.raises(SymbiosisError, match=why):
                await in_thread(lambda: make_transport(address).look(address))
        answer.update(status=200, text=f"shm://{tmp_path}/false.sock")
        with pytest.raises(UsageError, match="only tcp:// addresses for a client with a key"):
            await in_thread(lambda: make_transport(address, key="alice.secret").look(address))
        async with two(tmp_path) as (one, other, addresses):
            first, second = addresses_in(addresses)
            answer.update(status=200, text=first)
            async with symbiosis.connect(address) as base, base.client(lora(), seed=0) as client:
                job = asyncio.create_task(run_job(client, JOB))
                await until(lambda: one.statistics().requests > 20)
                answer.update(status=500)
                await in_thread(base._transport._addresses.looks)  # type: ignore[attr-defined]
                answer.update(status=200, text=f"{first}\n{second}\n")
                await one.close()
                assert_close(await job, expected)
            assert other.statistics().requests
        server.shutdown()
    with pytest.raises(ConnectionLostError, match=r"cannot read the addresses in http://127.0.0.1:\d+/llama"):
        await in_thread(lambda: make_transport(address).look(address))


@pytest.mark.parametrize(
    ("addresses", "options", "error", "why"),
    [
        ("shm:///a.sock,dist://h:1", {}, UsageError, "dist://h:1: an address beside others can be shm:// or tcp://"),
        ("inproc://a,shm:///a.sock", {}, UsageError, "inproc://a: an address beside others"),
        ("shm:///a.sock,shm:///a.sock", {}, UsageError, "different addresses"),
        ("shm:///a.sock,tcp://h:1", {"backend": "gloo"}, UsageError, "no option backend"),
        ("shm:///a.sock,nothing://h:1", {}, UnknownNameError, "unknown transport 'nothing'"),
    ],
)
def test_addresses_that_cannot_be_used_together(
    addresses: str, options: dict[str, str], error: type[SymbiosisError], why: str
) -> None:
    with pytest.raises(error, match=why):
        make_transport(addresses, **options)


async def test_replicas_have_keys_of_their_own(tmp_path: Path) -> None:
    """A tenant's key file has the certificates of all executors, and no other executor is trusted."""
    folders = [tmp_path / name for name in ("one", "other", "stranger")]
    for folder in folders:
        new_key(folder, "server")
    secret = new_key(folders[0], "alice")
    secret.write_text(secret.read_text() + (folders[1] / "server.public").read_text())
    for folder in folders[1:]:
        (folder / "alice.public").write_text((folders[0] / "alice.public").read_text())
    model = tiny_model()
    executors = [symbiosis.Executor(model) for _ in folders]
    async with executors[0], executors[1], executors[2]:
        listeners = [
            await executor.listen("tcp://127.0.0.1:0", keys=folder)
            for executor, folder in zip(executors, folders, strict=True)
        ]
        addresses = ",".join(listener.address for listener in reversed(listeners))
        async with symbiosis.connect(addresses, key=secret) as base, base.client() as client:
            expected = (await client.forward(input_ids=IDS)).logits
            await executors[1].close()
            assert (await client.forward(input_ids=IDS)).logits.equal(expected)
            states = (await base.status())["replicas"]
            assert "not the one in this client's key file" in states[listeners[2].address]["error"]
    assert [bool(executor.statistics().requests) for executor in executors] == [True, True, False]


async def test_mistakes_show_at_once(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, _, addresses):
        with pytest.raises(UsageError, match="listens at one address of shm"):
            await one.listen("shm:///a.sock,shm:///b.sock")
        with pytest.raises(UsageError, match=r"192.0.2.1.* is on another host; give key=file"):
            await make_transport(f"{addresses},tcp://192.0.2.1:1").connect(f"{addresses},tcp://192.0.2.1:1", "client")


def test_the_load_is_the_time_that_rows_take() -> None:
    decoding, training = RecentLoad(), RecentLoad()
    for number in range(200):
        decoding.ran(8, 0.1, number / 10)
        training.ran(512, 0.1, number / 10)
    assert 0.05 < decoding.at(20) < 0.2
    assert 0.8 < training.at(20) <= 1
    assert training.at(60) < 0.01


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_chaos_of_replicas(tmp_path: Path) -> None:
    """One of two replicas has two shards. One of these three processes is killed, ten times, under eight tenants
    that train and generate. Each result is checked. (Twenty times take seven minutes; docs/status.md.)"""
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=2)
    served = {f"shm://{tmp_path}/shards.sock": ("--shards", "2"), f"tcp://127.0.0.1:{free_port()}": ()}
    kinds = ["lora", "ia3-async", "prefix", "lora-async", "ia3", "prefix-async", "lora", "ia3-async"]
    rng = random.Random(0)
    with ExitStack() as stack:
        services = [Service(checkpoint, address, *options) for address, options in served.items()]
        shards, other = [stack.enter_context(service) for service in services]
        tenants = []
        for number, kind in enumerate(kinds):
            (folder := tmp_path / str(number)).mkdir()
            addresses = rng.sample(list(served), len(served))
            tenants.append(Tenant(",".join(addresses), kind, checkpoint, folder))
            stack.callback(tenants[-1].close)
        for _ in range(10):
            time.sleep(rng.uniform(1, 3))
            victim = rng.choice([shards, shards, other])
            if victim is shards and rng.random() < 0.5:
                psutil.Process(shards.pid).children()[0].kill()
                assert shards.wait(10) == 1, "the other shard ends with an error"
            else:
                victim.kill()
            victim.start()
        done = [tenant.finish() for tenant in tenants]
        assert all(done), done


def test_a_replica_that_was_lost_is_avoided_for_a_while(tmp_path: Path) -> None:
    """One that admits clients and then loses them, or does not admit them, does not keep them from the others."""
    clock = [0.0]
    several = Addresses(f"shm://{tmp_path}/a,shm://{tmp_path}/b")
    several._looked = time.monotonic() + 1e9  # no look but the one below
    bad, good = several.replicas
    looks = several.seen = seen({bad: 0.49, good: 0.1})
    several.looks = lambda patience_s=None: looks  # type: ignore[method-assign]
    choice = Choice(several, "model", {}, chance=lambda: 0.0, now=lambda: clock[0])
    assert choice.candidates() == [bad, good], "the busiest that is not crowded"
    for avoided in (60, 240, 960, 3600, 3600):
        choice._replica, choice._taken = bad, clock[0]
        assert choice.candidates() == [good, bad], "it was lost"
        clock[0] += avoided - 1
        assert choice.candidates() == [good, bad]
        clock[0] += 1
        assert choice.candidates() == [bad, good]
    choice._replica, choice._taken = bad, clock[0]
    clock[0] += 61
    assert choice.candidates() == [good, bad], "it worked for a minute, and then was lost"
    clock[0] += 60
    assert choice.candidates() == [bad, good]
    choice.failed(bad)  # it did not admit the client
    choice._replica, choice._taken = good, clock[0]
    several.seen = looks = seen({bad: 0.0, good: 0.9})
    assert not choice.better(), "a client does not leave for it either"
    clock[0] += 240
    several.seen = looks = seen({bad: 0.0, good: 0.9})
    assert choice.better()
    assert choice.candidates() == [bad, good]
    assert good not in choice._failures, "the client left it, and did not lose it"
