"""The memory that all connections of an executor may take together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.budget import CONNECTION_BYTES, COVERED_BYTES, STRANGER_BYTES, Account, Budget

MIB = 1 << 20


def account(budget: Budget, owner: str) -> Account:
    made = Account(budget)
    assert made.open("here")
    assert made.admit(owner)
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


def test_connections_count_and_those_of_strangers_keep_out_nobody() -> None:
    budget = Budget(1000 * MIB)
    strangers = [Account(budget) for _ in range(1024)]
    assert all(one.open("here") for one in strangers)
    assert budget.held == 1024 * STRANGER_BYTES
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
    second.wait(40 * MIB, lambda: found.append("second"))
    third.wait(30 * MIB, lambda: found.append("third"))
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
    second.wait(60 * MIB, pytest.fail)
    second.stop_waiting()
    first.close()
    assert budget.held == CONNECTION_BYTES
    second.wait(60 * MIB, pytest.fail)
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
                one.wait(size, lambda number=number: granted(number))  # type: ignore[misc]
        elif step == "stop":
            one.stop_waiting()
            waiting[number] = 0
        elif step == "close":
            one.close()
            held[number] = waiting[number] = 0
            connected[number] = one.open("here") and one.admit(str(number % 3))  # unless its owner holds too much
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
    one.wait(free + MIB // 4, lambda: granted.append(1))
    one.release(MIB // 4)
    assert granted
