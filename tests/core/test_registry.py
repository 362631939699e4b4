"""Policies and transports are found by name, built in or installed. An unknown name gives an error that lists the known
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from symbiosis.core import registry
from symbiosis.core.registry import POLICIES, PRIVACY, TRANSPORTS, make_policy, make_privacy, make_transport, names
from symbiosis.errors import UnknownNameError, UsageError
from symbiosis.policies import CoServing, Fair, Lockstep, NoLockstep, Opportunistic, RateLimit
from symbiosis.policies.opportunistic import WAIT_MS
from symbiosis.transports.inproc import InProcTransport


@pytest.mark.parametrize(("name", "cls"), [("no-lockstep", NoLockstep), ("lockstep", Lockstep)])
def test_built_in_policies(name: str, cls: type[Any]) -> None:
    assert type(make_policy(name)) is cls
    assert make_policy(name) is not make_policy(name)
    assert make_policy(name).name == name


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("opportunistic", (WAIT_MS, 50.0)),
        ("opportunistic:", (WAIT_MS, 50.0)),
        ("opportunistic:wait_ms=7", (7, 50.0)),
        ("opportunistic:wait_ms.decode=7", ({"decode": 7, "prefill": 2, "finetune": 2}, 50.0)),
        ("opportunistic:wait-ms=0.5,max_wait_ms=1e2", (0.5, 100.0)),
        ("opportunistic: wait_ms = 3 ", (3, 50.0)),
    ],
)
def test_options(spec: str, expected: tuple[float, float]) -> None:
    policy = make_policy(spec)
    assert isinstance(policy, Opportunistic)
    assert (policy.wait_ms, policy.max_wait_ms) == expected


def test_several_numbers_for_one_client() -> None:
    policy = make_policy("co-serving:clients.alice/chat=50/900,clients.bob=1e2/2.5")
    assert isinstance(policy, CoServing)
    assert policy.clients == {"alice/chat": (50.0, 900.0), "bob": (100.0, 2.5)}


def test_a_policy_around_another() -> None:
    policy = make_policy(
        "rate-limit:tokens_per_s=9+fair:quantum=1e+2,weights.alice=2,weights.bob=0.5+co-serving:slo_ms=50"
    )
    assert isinstance(policy, RateLimit)
    assert policy.tokens_per_s == 9
    assert isinstance(policy.policy, Fair)
    assert (policy.policy.quantum, policy.policy.weights) == (100.0, {"alice": 2.0, "bob": 0.5})
    assert isinstance(policy.policy.policy, CoServing)
    assert policy.name == "rate-limit+fair+co-serving"
    assert isinstance(make_policy("priority").policy, Opportunistic)  # type: ignore[attr-defined]


def test_an_object_is_returned_unchanged() -> None:
    policy = NoLockstep()
    assert make_policy(policy) is policy


@pytest.mark.parametrize(
    ("spec", "error", "complaint"),
    [
        ("magic", UnknownNameError, "unknown policy 'magic'; known are no-lockstep, lockstep, opportunistic"),
        ("", UnknownNameError, "unknown policy ''"),
        ("Lockstep", UnknownNameError, "unknown policy 'Lockstep'"),
        ("lockstep:wait_ms=2", UsageError, "'lockstep' has no option 'wait_ms=2'; it takes no options"),
        ("opportunistic:patience=2", UsageError, "no option 'patience=2'; it takes wait_ms, max_wait_ms"),
        ("opportunistic:wait_ms", UsageError, "given 'wait_ms' without a value; write wait_ms=VALUE"),
        ("opportunistic:wait_ms.decode", UsageError, "without a value; write wait_ms.decode=VALUE"),
        ("opportunistic:patience", UsageError, "no option 'patience'; it takes wait_ms, max_wait_ms"),
        ("opportunistic:wait_ms=soon", UsageError, "wait_ms is 'soon'; it must be a number of milliseconds"),
        ("opportunistic:wait_ms=-1", UsageError, "wait_ms is -1"),
        ("lockstep+opportunistic", UsageError, "'lockstep' cannot be around another"),
        ("fair+magic", UnknownNameError, "unknown policy 'magic'"),
        ("fair:policy=lockstep", UsageError, r"no option 'policy=lockstep'; .* after a plus: fair\+lockstep"),
        ("fair:policy", UsageError, r"no option 'policy'; .* after a plus: fair\+lockstep"),
        ("fair:patience=2", UsageError, "no option 'patience=2'; it takes quantum"),
        ("opportunistic:policy=lockstep", UsageError, "no option 'policy=lockstep'; it takes wait_ms"),
        ("fair:weights.alice=no", UsageError, "weight of 'alice' is 'no'"),
        ("fair:weights.=2", UsageError, "has no option 'weights.=2'"),
        ("fair:quantum=2,quantum=3", UsageError, "'quantum=3' and another value"),
        ("fair:weights.a=2,weights.b=2,weights.a=3", UsageError, "'weights.a=3' and another value"),
        ("opportunistic:wait_ms=2,wait-ms=2", UsageError, "'wait-ms=2' and another value"),
        ("opportunistic:wait_ms=2,wait_ms.decode=1", UsageError, "'wait_ms.decode=1' and another value"),
        ("opportunistic:wait_ms.decode=1,wait_ms=2", UsageError, "'wait_ms=2' and another value"),
        ("co-serving:clients=5", UsageError, "clients is 5; give one entry for each name"),
        ("co-serving:clients.alice=5", UsageError, "clients has 5 for 'alice'; give .*clients.alice=50/900"),
        ("co-serving:clients.alice=5/0", UsageError, "ttft_ms of 'alice' is 0"),
        ("co-serving:clients.alice=5/6/7", UsageError, r"clients has \(5, 6, 7\)"),
        ("co-serving:clients.alice=5/soon", UsageError, "clients has '5/soon'"),
        (3, UsageError, "policy is 3; give a name"),
        (None, UsageError, "policy is None"),
        (NoLockstep, UsageError, "policy is <class"),
    ],
    ids=str,
)
def test_bad_policies(spec: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        make_policy(spec)


def test_transports() -> None:
    assert isinstance(make_transport("inproc://somewhere"), InProcTransport)


@pytest.mark.parametrize(
    ("address", "error", "complaint"),
    [
        ("carrier-pigeon://roof", UnknownNameError, "unknown transport 'carrier-pigeon'; known are inproc"),
        ("somewhere", UsageError, "'somewhere' is not an address; write scheme://"),
        ("", UsageError, "'' is not an address"),
    ],
)
def test_bad_addresses(address: str, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        make_transport(address)


class TestInstalled:
    """Policies from entry points of other packages."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entries = {
            POLICIES: [
                EntryPoint("mine", "tests.core.test_registry:Mine", POLICIES),
                EntryPoint("broken", "tests.nowhere:Nothing", POLICIES),
                EntryPoint("another", "tests.core.test_registry:Another", POLICIES),
                EntryPoint("lockstep", "tests.core.test_registry:Mine", POLICIES),
            ],
            TRANSPORTS: [EntryPoint("mine", "symbiosis.transports.inproc:InProcTransport", TRANSPORTS)],
            PRIVACY: [EntryPoint("another", "tests.core.test_registry:Another", PRIVACY)],
        }
        monkeypatch.setattr(registry, "entry_points", lambda group: entries[group])

    def test_found(self) -> None:
        policy = make_policy("mine:speed=3")
        assert isinstance(policy, Mine)
        assert policy.speed == 3
        assert isinstance(make_transport("mine://here"), InProcTransport)

    def test_built_in_wins(self) -> None:
        assert isinstance(make_policy("lockstep"), Lockstep)

    def test_listed(self) -> None:
        assert {"no-lockstep", "lockstep", "opportunistic", "co-serving"} <= set(names(POLICIES)[:-3])
        assert names(POLICIES)[-3:] == ["another", "broken", "mine"]
        with pytest.raises(UnknownNameError, match="another, broken, mine"):
            make_policy("magic")

    def test_broken(self) -> None:
        with pytest.raises(UnknownNameError, match=r"'broken' is installed, but tests\.nowhere:Nothing") as caught:
            make_policy("broken")
        assert isinstance(caught.value.__cause__, ImportError)

    @pytest.mark.parametrize(("make", "what"), [(make_policy, "policy"), (make_privacy, "privacy")])
    def test_a_class_of_another_kind(self, make: Callable[[str], Any], what: str) -> None:
        with pytest.raises(UsageError, match=rf"{what} is <tests\.core\.test_registry\.Another object.*; give a name"):
            make("another")

    def test_missing_option(self) -> None:
        with pytest.raises(UsageError, match="speed"):
            make_policy("mine")


class Another:
    """Neither a policy nor a privacy scheme."""


class Mine(NoLockstep):
    name = "mine"

    def __init__(self, speed: float) -> None:
        self.speed = speed
