"""What clients ask for, what a policy is told of it, and what a client in another process may ask for."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.core.requests import Request
from symbiosis.core.terms import NO_TERMS, Kind, Terms, effective, kind_of
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, NoLockstep, Priority
from tests.helpers import F0, IDS, run_next, world_of


class _Notes(NoLockstep):
    """Record the terms and kinds of each client."""

    lone_at_once = False

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[Terms, Kind]]] = {}

    def submitted(self, request: Request) -> None:
        self.seen.setdefault(request.client, set()).add((request.terms, request.kind))


async def test_a_policy_receives_the_terms(base: Any) -> None:
    terms = {"priority": 3, "slo_ms": 50.0, "ttft_ms": 900.0, "kind": Kind.PREFILL}
    async with symbiosis.Executor(base, policy=(notes := _Notes())) as executor:
        async with executor.client(name="a", **terms) as a, executor.client(name="b") as b:
            await a.forward(input_ids=IDS)
            await b.forward(input_ids=IDS)
    assert notes.seen["a"] == {(Terms(3, 50.0, 900.0, Kind.PREFILL), Kind.PREFILL)}
    assert notes.seen["b"] == {(NO_TERMS, Kind.FINETUNE)}  # with gradients


@pytest.mark.parametrize("scheme", ["shm", "tcp", "dist"])
async def test_terms_from_another_process(base: Any, scheme: str, tmp_path: Path) -> None:
    """The client sends its terms when it joins, and again after the connection was lost."""
    terms = {"priority": -3, "slo_ms": 500.0, "ttft_ms": 900.0, "kind": Kind.PREFILL}
    asked = {(Terms(**terms), Kind.FINETUNE)}  # requests with gradients are fine-tuning, for any stated kind

    def synchronous(address: str) -> None:
        with symbiosis.open_model(address, name="blocking", **terms) as model:
            model(input_ids=IDS)

    options = {"insecure": True} if scheme == "dist" else {}
    async with symbiosis.Executor(base, policy=(notes := _Notes())) as executor:
        address = f"shm://{tmp_path}/s" if scheme == "shm" else f"{scheme}://127.0.0.1:0"
        listener = await executor.listen(address, **options)
        address = listener.address
        async with symbiosis.connect(address) as there, there.client(name="coroutine", **terms) as client:
            await client.forward(input_ids=IDS)
            await asyncio.to_thread(synchronous, address)
            assert notes.seen == {"coroutine": asked, "blocking": asked}
            notes.seen.clear()
            await listener.close()
            waits = asyncio.create_task(client.forward(input_ids=IDS))
            await asyncio.sleep(0.1)
            await executor.listen(address, **options)
            await asyncio.wait_for(waits, 30)
            assert notes.seen == {"coroutine": asked}


def test_terms_from_another_process_are_lowered_once() -> None:
    """Untrusted terms may lower the priority and lengthen the targets, never the opposite."""
    granted = Terms(2, 50.0, 900.0)
    assert effective(Terms(9, 10.0, 100.0), granted, trusted=False) == granted
    assert effective(Terms(-3, 80.0, 2000.0), granted, trusted=False) == Terms(-1, 80.0, 2000.0)
    assert effective(Terms(9, 10.0, 100.0), granted, trusted=True) == Terms(11, 10.0, 100.0)
    assert effective(NO_TERMS, granted, trusted=True) == granted
    assert effective(Terms(slo_ms=10.0), NO_TERMS, trusted=False) == Terms(slo_ms=10.0)  # the policy has no default


def test_a_client_in_another_process_cannot_raise_its_priority() -> None:
    terms = {"modest": Terms(priority=-1), "pushy": Terms(priority=1000), "gold": NO_TERMS}
    world = world_of(Priority(NoLockstep(), tenants={"gold": 2}), *terms, terms=terms)
    for name in terms:
        world.submit(name, F0, 1)
    order = []
    for _ in range(3):
        order += [request.client for request in world.complete(run_next(world))]
    assert order == ["gold", "pushy", "modest"]


@pytest.mark.parametrize(
    ("backward", "looks", "says", "trusted", "is_"),
    [
        (False, Kind.PREFILL, None, False, Kind.PREFILL),
        (False, Kind.PREFILL, Kind.FINETUNE, False, Kind.FINETUNE),
        (False, Kind.FINETUNE, Kind.DECODE, False, Kind.FINETUNE),
        (False, Kind.PREFILL, Kind.DECODE, True, Kind.DECODE),
        (True, Kind.DECODE, Kind.DECODE, False, Kind.FINETUNE),
    ],
)
def test_stated_kinds_of_rows(backward: bool, looks: Kind, says: Kind | None, trusted: bool, is_: Kind) -> None:
    """The provider may state any kind; a client in another process may only state a more patient one."""
    assert kind_of(Terms(kind=says), looks, 3, backward=backward, trusted=trusted) is is_


@pytest.mark.parametrize(("rows", "local", "is_"), [(64, False, 0), (65, False, 1), (4096, False, 1), (4096, True, 0)])
def test_decode_rows_are_believed_up_to_a_number_of_texts(rows: int, local: bool, is_: int) -> None:
    """Decode rows run first, so a prompt that is stated to be decode rows would delay all other clients."""
    assert kind_of(NO_TERMS, Kind.DECODE, rows, backward=False, trusted=local) is Kind(is_)


def test_a_loose_slo_in_another_process_delays_no_client() -> None:
    """The client stops in the middle of a token. The policy gives this token up as soon as one with the default SLO."""
    policy = CoServing(slo_ms=100)
    world = world_of(policy, "gone", "job", terms={"gone": Terms(slo_ms=20_000.0)})
    world.submit("gone", F0, 1)
    world.complete(run_next(world))
    world.clock.advance(0.25)
    assert policy.walks.slack(Kind.PREFILL, world.clock.now) == math.inf


@pytest.mark.parametrize(("asked", "slack"), [(1.0, 0.2), (None, 0.2), (500.0, 0.5)])
def test_a_client_in_another_process_cannot_stop_fine_tuning_with_a_tight_slo(
    asked: float | None, slack: float
) -> None:
    policy = CoServing(slo_ms=200)
    world_of(policy, "a", terms={"a": Terms(slo_ms=asked)}).submit("a", F0, 1)
    assert 0.4 * slack < policy.walks.slack(Kind.PREFILL, 0.0) < slack


@pytest.mark.parametrize(
    "terms", [{"priority": 1.5}, {"priority": 10**6}, {"slo_ms": 0}, {"ttft_ms": float("nan")}, {"kind": "decode"}]
)
def test_invalid_terms(base: Any, terms: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(terms))):
        symbiosis.Executor(base).client(**terms)


def test_a_client_with_an_slo_of_its_own() -> None:
    """Fine-tuning waits for a client with a tighter SLO."""
    slack = {}
    for slo_ms in (None, 20.0):
        policy = CoServing(slo_ms=200)
        world = world_of(policy, "a", terms={"a": Terms(slo_ms=slo_ms)}, local=True)
        world.submit("a", F0, 1)
        slack[slo_ms] = policy.walks.slack(Kind.PREFILL, 0.0)
    assert slack[20.0] < 0.02 < slack[None]
