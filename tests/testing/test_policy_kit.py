"""The conformance kit catches policies with one error each, and names the error.

If the scheduler refuses a decision, it names the policy, and serves requests in the order of their arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from symbiosis.core.policy import Policy, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import HELD_S, Scheduler, WaitUntil
from symbiosis.core.terms import Kind
from symbiosis.errors import PolicyError, UsageError
from symbiosis.policies import Fair, Lockstep, NoLockstep
from symbiosis.testing import PolicyConformance, World
from tests.helpers import PROFILE

BAD: dict[str, tuple[type[Any], str]] = {}
"""Policies with an error, and a part of the message that the kit must raise, by name."""


def bad(complaint: str) -> Callable[[type[Any]], type[Any]]:
    def register(cls: type[Any]) -> type[Any]:
        BAD[cls.__name__] = (cls, complaint)
        return cls

    return register


class Oldest(Policy):
    """A correct policy to start from: run the oldest request with all requests of its key that fit."""

    name = "bad-one"

    def decide(self, view: View, now: float) -> Any:
        key = view.oldest.key
        return Run(key, view.queues[key].take(view.max_rows), "oldest")


@bad("raised in submitted(): AssertionError")
class NoJointRequests(Oldest):
    def submitted(self, request: Request) -> None:
        assert not request.joint, "a joint request"


@bad("starves a request")
class LongestQueueFirst(Oldest):
    def decide(self, view: View, now: float) -> Any:
        key = max(view.queues, key=lambda key: view.queues[key].rows)
        return Run(key, view.queues[key].take(view.max_rows), "longest")


@bad("starves a request")
class UrgentFirst(Oldest):
    """The priority has no time limit."""

    def decide(self, view: View, now: float) -> Any:
        key = max(view.queues, key=lambda key: view.queues[key].oldest.terms.priority)
        return Run(key, view.queues[key].take(view.max_rows), "urgent")


@bad("starves a request")
class TuningLast(Oldest):
    """Fine-tuning waits while any other request is queued."""

    def decide(self, view: View, now: float) -> Any:
        key = min(view.queues, key=lambda key: (view.queues[key].oldest.kind, view.queues[key].oldest.id))
        return Run(key, view.queues[key].take(view.max_rows), "tuning last")


@bad("KeyError")
class DoesNotKnowTheSecondTenant(Oldest):
    def submitted(self, request: Request) -> None:
        assert {"tenant-0": 1, "victim": 1, "alone": 1}[request.client.partition("/")[0]]


@bad("starves a request")
class JointLast(Oldest):
    """Joint requests wait while any other request is queued."""

    def decide(self, view: View, now: float) -> Any:
        requests = [request for queue in view.queues.values() for request in queue]
        request = min(requests, key=lambda request: (bool(request.joint), request.id))
        return Run(request.key, [(request, min(request.remaining, view.max_rows))], "joint last")


@bad("starves a request")
class CancelledFirst(Oldest):
    """A client of which a request was cancelled precedes all others from then on."""

    def __init__(self) -> None:
        self.first: set[str] = set()

    def cancelled(self, request: Request) -> None:
        self.first.add(request.client)

    def decide(self, view: View, now: float) -> Any:
        requests = [request for queue in view.queues.values() for request in queue]
        request = min(requests, key=lambda request: (request.client not in self.first, request.id))
        return Run(request.key, [(request, min(request.remaining, view.max_rows))], "cancelled first")


@bad("times in a row without an event in between")
class AsksAgainAfterACancellation(Oldest):
    def __init__(self) -> None:
        self.waits = False

    def cancelled(self, request: Request) -> None:
        self.waits = True

    def decide(self, view: View, now: float) -> Any:
        return Wait(now + 1e-3) if self.waits and view.thinking else super().decide(view, now)


@bad("starves a request")
class FirstLayerFirst(Oldest):
    def decide(self, view: View, now: float) -> Any:
        key = min(view.queues)
        return Run(key, view.queues[key].take(view.max_rows), "first")


@bad("starves a request")
class SmallestFirst(Oldest):
    """Run the shortest request of all clients first."""

    def decide(self, view: View, now: float) -> Any:
        first: dict[tuple[str, Key], Request] = {}
        for queue in view.queues.values():
            for request in queue:
                first.setdefault((request.client, request.key), request)
        request = min(first.values(), key=lambda request: (request.remaining, -request.id))
        return Run(request.key, [(request, min(request.remaining, view.max_rows))], "smallest")


@bad("waits without a limit while no client is thinking")
class WaitsForEver(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(None)


@bad("waits without a limit while no client is thinking")
class WaitsUntilInfinity(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(math.inf)


@bad("while no client is thinking")
class WaitsAgainAndAgain(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(now + 0.01)


@bad("while no client is thinking")
class WaitsALongTime(Oldest):
    def __init__(self) -> None:
        self.waited = False

    def decide(self, view: View, now: float) -> Any:
        self.waited = not self.waited
        return Wait(now + 60) if self.waited else super().decide(view, now)


@bad("times in a row without an event in between")
class AsksAgainAllTheTime(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(now + 1e-7) if view.thinking else super().decide(view, now)


@bad("not after now")
class WaitsInThePast(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(now)


@bad("not after now")
class WaitsUntilNever(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait(math.nan)


@bad("out of order, or twice")
class NewestFirst(Oldest):
    def decide(self, view: View, now: float) -> Any:
        queue = view.queues[view.oldest.key]
        request = list(queue)[-1]
        return Run(queue.key, [(request, min(request.remaining, view.max_rows))], "newest")


@bad("out of order, or twice")
class TakesTwice(Oldest):
    def decide(self, view: View, now: float) -> Any:
        oldest = view.oldest
        return Run(oldest.key, [(oldest, 1), (oldest, 1)], "twice")


@bad("are allowed")
class ExceedsTheCap(Oldest):
    def decide(self, view: View, now: float) -> Any:
        key = view.oldest.key
        return Run(key, view.queues[key].take(10**9), "greedy")


@bad("are allowed")
class TakesNothing(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [], "nothing")


@bad("takes 0 rows")
class TakesNoRows(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(view.oldest, 0)], "no rows")


@bad("is allowed")
class TakesMoreThanThereIs(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(view.oldest, view.oldest.remaining + 1)], "more")


@bad("not queued for")
class MixesKeys(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(queue.oldest, 1) for queue in view.queues.values()], "mixed")


@bad("nothing is queued")
class RunsWhatIsNotThere(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(Key((0,), Pass.FORWARD_WITHOUT_BIAS), [(view.oldest, 1)], "nowhere")


@bad("not queued for")
class RunsWhatIsDone(Oldest):
    """Keep a list of requests, and run cancelled and served ones again."""

    def __init__(self) -> None:
        self.all: list[Request] = []

    def submitted(self, request: Request) -> None:
        self.all.append(request)

    def decide(self, view: View, now: float) -> Any:
        request = next((request for request in self.all if request.key == view.oldest.key), view.oldest)
        return Run(request.key, [(request, 1)], "again")


@bad("KeyError")
class Raises(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return {}["queue"]


@bad("raised in submitted()")
class RaisesWhenSubmitted(Oldest):
    def submitted(self, request: Request) -> None:
        raise ZeroDivisionError


@bad("raised in slo()")
class HasNoTargets(Oldest):
    def slo(self) -> Any:
        raise KeyError("no targets")


@bad("in service()")
class CountsInWords(Oldest):
    def service(self) -> Any:
        return {"tenant-0": "much"}


@bad("raised in may_join()")
class RaisesWhenAsked(Oldest):
    def may_join(self, client: str, now: float) -> bool:
        raise KeyError(client)


@bad("raised in unloaded()")
class RaisesAtTheFirstMeasurement(Oldest):
    def unloaded(self, seconds: float) -> None:
        raise KeyError(seconds)


@bad("neither Run nor Wait")
class ReturnsNone(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return None


@bad("neither Run nor Wait")
class ReturnsItsRequest(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return view.oldest


@bad("raised")
class WaitsForAString(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Wait("a while")  # type: ignore[arg-type]


@bad("rows of request")
class TakesHalfARow(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(view.oldest, 0.5 + view.oldest.remaining / 2)], "half")  # type: ignore[list-item]


@bad("np.int64")
class CountsWithNumpy(Oldest):
    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(view.oldest, np.int64(1))], "one")  # type: ignore[list-item]


@bad("name")
class HasNoName(Oldest):
    name = ""


TESTS = [name for name in dir(PolicyConformance) if name.startswith("test_")]


@pytest.fixture(autouse=True)
def no_shrinking() -> Iterator[None]:
    """Do not search for the shortest counterexample, which takes time."""
    settings.register_profile("no-shrinking", settings(), phases=[Phase.generate])
    settings.load_profile("no-shrinking")
    yield
    settings.load_profile(PROFILE)


def complaints(policy: type[Any], about: str | None = None, tests: Sequence[str] = TESTS, examples: int = 50) -> str:
    """Return the messages of the kit's tests for a policy, up to the first one with ``about``."""

    class Kit(PolicyConformance):
        max_examples = examples

        def make_policy(self) -> Policy:
            made: Policy = policy()
            return made

    found = []
    for test in tests:
        try:
            getattr(Kit(), test)()
        except (AssertionError, PolicyError, ExceptionGroup) as error:
            found.append(f"{test}: {flatten(error)}")
            if about is not None and about in found[-1]:
                break
    return "\n".join(found)


def flatten(error: BaseException) -> str:
    parts = [flatten(part) for part in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return " | ".join([str(error), *parts])


@pytest.mark.parametrize("name", BAD)
def test_bad_policies_are_caught(name: str) -> None:
    policy, complaint = BAD[name]
    said = complaints(policy, complaint)
    assert said, f"the kit finds no fault with {name}"
    assert complaint in said, said


class InPieces(Oldest):
    """Run strictly in the order of arrival, in small batches."""

    def decide(self, view: View, now: float) -> Any:
        return Run(view.oldest.key, [(view.oldest, min(view.oldest.remaining, 4))], "in pieces")


def test_a_good_policy_passes() -> None:
    assert complaints(Oldest) == ""
    assert complaints(NoLockstep) == ""


def test_small_batches_in_the_order_of_arrival_starve_no_request() -> None:
    assert complaints(InPieces, tests=["test_no_request_starves_wide"], examples=10) == ""


REFUSED = [
    WaitsForEver,
    WaitsUntilInfinity,
    WaitsInThePast,
    WaitsUntilNever,
    TakesTwice,
    ExceedsTheCap,
    TakesNothing,
    TakesNoRows,
    TakesMoreThanThereIs,
    MixesKeys,
    RunsWhatIsNotThere,
    Raises,
    RaisesWhenSubmitted,
    ReturnsNone,
    ReturnsItsRequest,
    WaitsForAString,
    TakesHalfARow,
]


@pytest.mark.parametrize("policy", REFUSED)
def test_refused_decisions_name_the_policy_and_serve_in_order(policy: type[Any]) -> None:
    scheduler = Scheduler(policy(), layers=2, max_rows=8)
    scheduler.client_joined("a")
    scheduler.client_joined("b")
    keys = [Key((0,), Pass.FORWARD), Key((1,), Pass.FORWARD), Key((1,), Pass.BACKWARD)]
    requests = [
        Request(number, "ab"[number % 2], keys[number % 3], 3 + 4 * (number % 3), Kind.DECODE, 0.0)
        for number in range(9)
    ]
    for request in requests:
        scheduler.submit(request)
    served: list[int] = []
    for _ in range(40):
        oldest = next((request for request in requests if request.remaining), None)
        action = scheduler.next_action(1.0)
        if isinstance(action, WaitUntil):
            break
        assert isinstance(action, Batch)
        if action.reason == "policy-error":
            assert [piece.request for piece in action.slices] == [oldest]
        served += [request.id for request in scheduler.completed(action, 1e-3, 0.0)]
        scheduler.validate()
    assert sorted(served) == list(range(9))
    assert scheduler.policy_errors
    for error in scheduler.policy_errors:
        assert isinstance(error, PolicyError)
        assert "'bad-one'" in str(error)
    if policy is Raises:
        assert isinstance(scheduler.policy_errors[0].__cause__, KeyError)


@pytest.mark.parametrize("method", ["submitted", "decide", "started", "ran", "cancelled"])
def test_errors_name_the_policy_and_the_method_that_raised(method: str) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("lost")

    scheduler = Scheduler(type("Fails", (Oldest,), {method: fails})(), layers=2, max_rows=8)
    scheduler.client_joined("a")
    for number in range(2):
        scheduler.submit(Request(number, "a", Key((0,), Pass.FORWARD), 3, Kind.DECODE, 0.0))
    scheduler.cancel(1, 0.0)
    batch = scheduler.next_action(1.0)
    assert isinstance(batch, Batch)
    assert len(scheduler.completed(batch, 1e-3, 0.0)) == 1
    text = str(scheduler.policy_errors[0])
    assert f"policy 'bad-one' raised in {method}(): KeyError('lost'); " in text
    assert ("the oldest request was served instead" in text) == (method == "decide")


def test_a_policy_belongs_to_one_scheduler() -> None:
    """A policy with two schedulers would confuse their requests, also inside a wrapper."""
    for first, second in (
        (shared := NoLockstep(), shared),
        (shared := NoLockstep(), Fair(shared)),
        (Fair(shared := NoLockstep()), shared),
    ):
        Scheduler(first, layers=1, max_rows=8)
        with pytest.raises(UsageError, match="make a new one"):
            Scheduler(second, layers=1, max_rows=8)
    for _ in range(100):  # a new object may have the address of an old one
        Scheduler(NoLockstep(), layers=1, max_rows=8)


def _decided(world: World) -> Batch:
    action = world.decide()
    assert isinstance(action, Batch), action
    return action


class TestTheWorldItself:
    """The records of a world catch an error of the scheduler."""

    def make(self) -> World:
        world = World(NoLockstep(), layers=2, max_rows=8)
        world.join("a")
        world.begin_walk("a")
        return world

    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_the_keys_are_of_layers_that_exist(self, layers: int) -> None:
        world = World(NoLockstep(), layers=layers, max_rows=8)
        assert {layer for key in world.keys for layer in key.layers} == set(range(layers))
        assert world.keys[:2] == [Key((0,), Pass.FORWARD), Key((0,), Pass.BACKWARD)]
        assert len(world.keys) == len(set(world.keys)) == 2 * layers + (layers > 1)

    def test_a_lost_request(self) -> None:
        world = self.make()
        request = world.submit("a", world.keys[0], 3)
        world.scheduler.cancel(request.id, 0.0)
        with pytest.raises(AssertionError, match="lost"):
            world.check()

    def test_a_request_served_twice(self) -> None:
        world = self.make()
        world.submit("a", world.keys[0], 3)
        batch = world.decide()
        assert isinstance(batch, Batch)
        with pytest.raises(AssertionError, match="row 3 is next, not 0"):
            world._check_batch(batch)

    def test_a_batch_of_two_keys(self) -> None:
        world = self.make()
        world.submit("a", world.keys[0], 3)
        batch = world.decide()
        assert isinstance(batch, Batch)
        batch.key = world.keys[1]
        with pytest.raises(AssertionError, match="has rows of"):
            world._check_batch(batch)

    @pytest.mark.parametrize("then", ["submits", "begins a walk", "begins a walk and submits"])
    def test_a_request_that_was_passed_over_stays_so(self, then: str) -> None:
        """Its client submits another one outside a walk, or begins a walk. The scheduler ends waits after HELD_S."""
        world = World(Lockstep(), layers=2, max_rows=8)
        for name in ("late", "first", "thinker-0", "thinker-1"):
            world.join(name)
        world.submit("late", world.keys[2], 1)
        world.submit("first", world.keys[0], 1)
        assert [request.client for request in world.complete(_decided(world))] == ["first"]
        if then == "submits":
            world.submit("late", world.keys[2], 1)
        else:
            world.begin_walk("late")
        if then == "begins a walk and submits":
            world.complete(_decided(world))
            world.submit("late", world.keys[2], 1)
        for number in range(2):
            world.begin_walk(f"thinker-{number}")
            assert isinstance(world.decide(), WaitUntil)
            world.clock.advance(HELD_S / 2)
        assert {request.client for request, _, _ in _decided(world).slices} == {"late"}

    def test_a_clock_that_goes_back(self) -> None:
        with pytest.raises(ValueError, match="-1"):
            self.make().clock.advance(-1)
