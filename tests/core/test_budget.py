"""The memory that all connections of an executor may take together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.budget import CONNECTION_BYTES, COVERED_BYTES, UNKNOWN_BYTES, Account, Budget

MIB = 1 << 20


def account(budget: Budget, owner: str, cut: Callable[[], object] = lambda: None) -> Account:
    made = Account(budget, cut)
    assert made.open("here")
    assert made.belong_to(owner)
    return made


def fill(one: Account) -> int:
    """Hold as much as there is room for, in steps of 1 MiB. Return how much that is in MiB."""
    found = 0
    while one.hold(MIB):
        found += 1
    return found


@pytest.mark.parametrize("owners", [1, 2, 3, 9])
def test_greedy_owners_leave_room_for_another_one(owners: int) -> None:
    budget = Budget(1000 * MIB)
    accounts = [account(budget, str(owner)) for owner in range(owners)]
    while sum(one.hold(MIB) for one in accounts):
        pass
    free = 1000 * MIB - budget.held
    assert free >= 1000 * MIB // (owners + 1) - 12 * MIB
    assert account(budget, "newcomer").hold(free // 2)


def test_a_larger_budget_admits_what_waits_and_a_smaller_one_takes_nothing_away() -> None:
    budget, granted = Budget(64 * MIB), []
    one = account(budget, "one")
    assert not one.hold(100 * MIB)
    one.wait(100 * MIB, 0, lambda: granted.append("one"))
    budget.resize(300 * MIB)
    assert granted == ["one"]
    budget.resize(64 * MIB)
    assert budget.held > budget.total
    another = Account(budget)
    assert not another.open("here")
    one.release(100 * MIB)
    assert another.open("here")


def test_connections_count_and_those_of_strangers_keep_out_nobody() -> None:
    budget = Budget(1000 * MIB)
    strangers = [Account(budget) for _ in range(1024)]
    assert all(one.open("here") for one in strangers)
    assert budget.held == 1024 * UNKNOWN_BYTES
    alice = [account(budget, "alice") for _ in range(100)]
    for one in strangers:
        one.close()
    assert budget.held == 100 * CONNECTION_BYTES
    for one in alice:
        one.close()
        one.close()
    assert budget.held == 0


def test_a_connection_that_holds_little_needs_no_room() -> None:
    budget = Budget(64 * MIB)
    greedy, modest = account(budget, "greedy"), account(budget, "modest")
    fill(greedy)
    other = account(budget, "other")
    fill(other)
    while budget.take("others", MIB // 16):
        pass
    assert modest.hold(COVERED_BYTES)
    modest.release(COVERED_BYTES)


def test_the_largest_call_fits_three_times_into_the_part_of_one_owner() -> None:
    budget = Budget(64 * MIB)
    assert account(budget, "one").hold(3 * budget.largest)


def test_accounts_that_wait_get_room_in_order() -> None:
    budget = Budget(100 * MIB)
    first, second, third, fourth = (account(budget, name) for name in ("first", "second", "third", "fourth"))
    assert first.hold(40 * MIB)
    assert fourth.hold(30 * MIB)
    found: list[str] = []
    second.wait(40 * MIB, 0, lambda: found.append("second"))
    third.wait(30 * MIB, 0, lambda: found.append("third"))
    first.release(10 * MIB)
    assert found == ["third"], "the room is too small for the second one, who must not stop the third"
    third.release(30 * MIB)
    first.release(20 * MIB)
    assert found == ["third", "second"]
    assert budget.held == 4 * CONNECTION_BYTES + (10 + 30 + 40) * MIB - 3 * COVERED_BYTES


def test_an_account_that_stops_waiting_gets_nothing() -> None:
    budget = Budget(100 * MIB)
    first, second = account(budget, "first"), account(budget, "second")
    assert first.hold(40 * MIB)
    second.wait(60 * MIB, 0, pytest.fail)
    second.stop_waiting()
    first.close()
    assert budget.held == CONNECTION_BYTES
    second.wait(60 * MIB, 0, pytest.fail)
    second.close()
    assert budget.held == 0


STEPS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["hold", "release", "wait", "close", "stop"]),
                           st.integers(0, 90 * MIB)), max_size=60)  # fmt: skip


@given(STEPS)
def test_what_is_held_is_counted_and_never_exceeds_the_total(steps: list[tuple[int, str, int]]) -> None:
    budget = Budget(100 * MIB)
    accounts = [account(budget, str(number % 3)) for number in range(5)]
    held, waiting, connected = [0] * 5, [0] * 5, [True] * 5

    def granted(number: int) -> None:
        held[number] += waiting[number]
        waiting[number] = 0

    for number, step, size in steps:
        one = accounts[number]
        if step != "close" and not connected[number]:
            continue
        if step == "hold":
            held[number] += size * one.hold(size)
        elif step == "release":
            size = min(size, held[number])
            held[number] -= size
            one.release(size)
        elif step == "wait" and not waiting[number]:
            waiting[number] = size
            if one.hold(size):
                granted(number)
            else:
                one.wait(size, 0, lambda number=number: granted(number))  # type: ignore[misc]
        elif step == "stop":
            one.stop_waiting()
            waiting[number] = 0
        elif step == "close":
            one.close()
            held[number] = waiting[number] = 0
            one = accounts[number] = Account(budget)
            connected[number] = one.open("here") and one.belong_to(str(number % 3))  # unless its owner holds too much
            if not connected[number]:
                one.close()
        wanted = sum(connected) * CONNECTION_BYTES + sum(max(one - COVERED_BYTES, 0) for one in held)
        assert budget.held == wanted <= budget.total
    for one in accounts:
        one.close()
    assert budget.held == 0


def test_freed_is_called_when_as_much_as_the_largest_call_was_given_back() -> None:
    calls: list[int] = []
    budget = Budget(80 * MIB, lambda: calls.append(1))
    one = account(budget, "alice")
    for expected in (0, 1, 2):
        assert len(calls) == expected
        for _ in range(21):  # half of each MiB counts
            assert one.hold(MIB)
            one.release(MIB)


def test_a_connection_that_releases_bytes_gets_what_it_waits_for() -> None:
    """Also where these bytes were covered, and count for nothing."""
    budget = Budget(64 * MIB)
    one = account(budget, "alice")
    assert one.hold(COVERED_BYTES)
    free = budget.total - budget.held - CONNECTION_BYTES
    granted: list[int] = []
    one.wait(free + MIB // 4, 0, lambda: granted.append(1))
    one.release(MIB // 4)
    assert granted


def kept(budget: Budget, owner: str, size: int, cut: Callable[[], object] = lambda: None) -> Account:
    """Return an account that keeps so many bytes between calls, as an arena of shm:// does."""
    made = account(budget, owner, cut)
    assert made.keep(size)
    return made


def names(found: list[Account]) -> list[str]:
    return [one.owner for one in found]


def test_idle_connections_are_chosen_first_the_largest_first_and_no_more_than_needed() -> None:
    budget = Budget(100 * MIB)
    for name, size in (("S", 5), ("L", 20), ("M", 15)):
        kept(budget, name, size * MIB)
    active, greedy = kept(budget, "A", 10 * MIB), account(budget, "G")
    assert greedy.hold(22 * MIB)
    waiting = account(budget, "W")
    waiting.wait(30 * MIB, 0, pytest.fail)
    since = waiting._waits_since
    assert active.hold(0)  # it makes a call meanwhile
    assert active.idle_since(since) is False
    free = budget.total - budget.held
    assert names(budget.rivals("W", free + 10 * MIB, since)) == ["L"]
    assert names(budget.rivals("W", free + 25 * MIB, since)) == ["L", "M"]
    assert names(budget.rivals("W", free + 200 * MIB, since)) == [], "their end would not be enough"
    assert names(budget.rivals("W", free + 10 * MIB)) == [], "no owner holds more than W would"


def test_the_connection_that_holds_most_of_the_owner_that_holds_most_is_cut() -> None:
    cut: list[str] = []
    budget = Budget(80 * MIB)
    many = [account(budget, "many", lambda name=f"many {number}": cut.append(name)) for number in range(3)]  # type: ignore[misc]
    for number, one in enumerate(many):
        assert one.hold((5 + 5 * number) * MIB)
    single = account(budget, "single", lambda: cut.append("single"))
    assert single.hold(25 * MIB)
    waiting = account(budget, "waiting")
    assert not waiting.hold(35 * MIB)
    waiting.wait(35 * MIB, 0, lambda: cut.append("granted"))
    waiting.make_room()
    assert cut == [], "no owner holds more than 36 MiB"
    waiting.stop_waiting()
    other = kept(budget, "other", 9 * MIB)
    waiting.wait(24 * MIB, 0, lambda: cut.append("granted"))
    assert other.hold(0)
    waiting.make_room()
    assert cut == ["many 2"]
    many[2].leave()
    waiting.make_room()
    assert cut == ["many 2"], "enough is given back soon"
    many[2].close()
    assert cut == ["many 2", "granted"]


def test_owners_that_hold_as_much_do_not_cut_each_other() -> None:
    budget = Budget(100 * MIB)
    owners = [account(budget, str(number), pytest.fail) for number in range(4)]
    for one in owners[:3]:
        assert one.hold(21 * MIB)
    owners[3].wait(21 * MIB, 0, lambda: None)
    owners[3].make_room()


def test_a_newcomer_has_owners_cut_that_hold_more_and_no_others() -> None:
    budget = Budget(40 * MIB)
    cut: list[str] = []
    first = account(budget, "first", lambda: cut.append("first"))
    modest = [account(budget, f"modest {number}", pytest.fail) for number in range(19)]
    assert first.hold(19 * MIB)
    while budget.total - budget.held >= CONNECTION_BYTES:
        modest.append(account(budget, f"modest {len(modest)}", pytest.fail))
    newcomer = Account(budget)
    assert newcomer.open("here")
    assert not newcomer.belong_to("newcomer")
    assert cut == ["first"]
    first.leave()
    assert not newcomer.belong_to("newcomer")
    assert cut == ["first"]
    first.close()
    assert newcomer.belong_to("newcomer")
    for one in modest:
        assert one.size == CONNECTION_BYTES


@given(STEPS, st.integers(0, 60 * MIB), st.booleans())
def test_rivals(steps: list[tuple[int, str, int]], size: int, idle: bool) -> None:
    """They give enough, none of them is needless, and an owner within its part finds some."""
    budget = Budget(100 * MIB)
    accounts = [account(budget, str(number % 4)) for number in range(6)]
    for number, step, much in steps:
        one = accounts[number]
        if step == "hold":
            one.hold(much)
        elif step == "wait":
            one.keep(one.kept + much // 4)
        elif step == "close":
            one.leave()
    owner, since = "0", budget._turns + 1 if idle else 0
    would, free = budget._by[owner] + size, budget.total - budget.held
    found = budget.rivals(owner, size, since)
    leaving = sum(one.size for one in accounts if one.leaving)
    held = Counter(dict.fromkeys("0123", 0))
    for one in accounts:
        held[one.owner] += 0 if one.leaving else one.size
    if found:
        assert would > free + leaving + sum(one.size for one in found[:-1])
    elif 4 * would + budget._by[owner] <= budget.total:
        assert would <= free + leaving
    for one in found:
        assert one.owner != owner
        assert not one.leaving
        assert one.idle_since(since) or held[one.owner] > would
        held[one.owner] -= one.size
    if found or would <= free + leaving:
        for one in accounts:
            if one in found or (one.leaving and one.owner != owner):
                one.close()
        if not any(one.leaving for one in accounts if one.owner == owner):
            assert budget.take(owner, size)


@given(STEPS)
def test_the_first_connection_whose_owner_is_not_known_finds_room(steps: list[tuple[int, str, int]]) -> None:
    """So a tenant with a key can come, and have others cut, whatever the others hold."""
    budget = Budget(20 * MIB)
    for number, step, size in steps:
        one = Account(budget)
        assert one.open("here")
        if one.belong_to(f"{number} {step}" if size % 2 else f"{size}"):
            one.hold(size // 4)
        else:
            one.close()
    assert Account(budget).open("elsewhere")
