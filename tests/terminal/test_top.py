"""Tests of the view of an executor: what is accepted, rates, the reasons why nothing is shared, and tables."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from symbiosis.errors import WireError
from symbiosis.terminal.top import between, fitted, read, screen, view, why_unshared


def tenant(requests: int = 10, **counts: Any) -> dict[str, Any]:
    return {"requests": requests, "members": requests, "rows": 20 * requests, "wait_s": requests / 1000, **counts}


def status(at: float = 2.0, apart: dict[str, int] | None = None, **tenants: Any) -> dict[str, Any]:
    counts = {"blocks": 2, "requests": 20, "batches": 10, "members": 20, "rows": 40, "wait_s": 1}
    layers = {"model.layers.*.q forward": counts}
    activity = {"at": at, "batches": 10, "members": 20, "run_s": 0.02, "layers": layers, "apart": apart or {}}
    known = {"model": "Llama", "policy": "P()", "served_layers": "2 layers", "load": 0.5}
    return {**known, "activity": {**activity, "tenants": tenants}, "ignored": object()}


def why(**options: Any) -> str:
    return "\n".join(why_unshared(read(status(**options))["activity"]))


def shown(past: dict[str, Any], **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=140, **options).print(view(past, "shm:///s"))
    return out.getvalue()


def change(where: str, value: Any) -> dict[str, Any]:
    """Return a status with another value at a place such as ``activity/tenants``."""
    found: Any = status(alice=tenant())
    *path, last = where.split("/")
    inner = found
    for name in path:
        inner = inner[name]
    inner[last] = value
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("activity", 3),
        ("activity/tenants", ["alice"]),
        ("activity/tenants", {3: {}}),
        ("activity/tenants", {str(number): {} for number in range(10_001)}),
        ("activity/tenants/alice", 1),
        ("activity/tenants/alice/requests", "many"),
        ("activity/tenants/alice/requests", True),
        ("activity/tenants/alice/requests", -1),
        ("activity/tenants/alice/wait_s", float("nan")),
        ("activity/tenants/alice/wait_s", float("inf")),
        ("activity/tenants/alice/tokens", {"decode": []}),
        ("activity/tenants/alice/unshared", {"alone": 3}),
        ("activity/apart", {"5 ms": None, "10 ms": {}}),
        ("load", "high"),
    ],
)
def test_a_malformed_status_is_refused(where: str, value: Any) -> None:
    with pytest.raises(WireError):
        read(change(where, value))


def test_what_an_executor_does_not_tell_counts_as_nothing() -> None:
    past = between(read({}), None)
    assert past["tenants"] == past["layers"] == {}
    assert past["why"] == ["No request was answered."]
    assert "no batches" in shown(past)


def test_a_terminal_obeys_no_text_of_an_executor() -> None:
    evil = "\x1b[31m[bold]a\nb\x07"
    unshared = {evil: {evil: 10}}
    both = {"a": tenant(unshared=unshared, passes={evil: 1}, waits={evil: 1.0}, alone={evil: 3}), evil: tenant()}
    found = status(**both)
    found["policy"] = found["model"] = evil
    found["activity"]["layers"] = {evil: found["activity"]["layers"].popitem()[1]}
    text = shown(between(read(found), None))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[31m[bold]a b" in text, "markup is shown, not obeyed"
    assert len(shown(between(read(change("policy", "x" * 9000)), None))) < 5000


def test_tenants_whose_names_differ_in_spaces_are_told_apart() -> None:
    names = {"alice": tenant(), "alice ": tenant(), "al  ice": tenant(), "al ice": tenant()}
    past = between(read(status(**names)), None)
    assert past["tenants"].keys() == names.keys()


def test_rates_are_those_of_the_interval() -> None:
    before = read(status(at=10.0, alice=tenant(10), bob=tenant(50)))
    alice = tenant(30, members=50, tokens={"decode": 8.0}, slo_kept=3, slo_missed=1, clients=2, held_bytes=7)
    later = status(at=14.0, alice=alice, bob=tenant(50))
    later["activity"] |= {"batches": 20, "members": 50}
    past = between(read(later), before)
    assert past["seconds"] == 4
    assert past["requests_per_batch"] == 3
    assert past["tenants"].keys() == {"alice"}, "bob did nothing and has no client"
    found = past["tenants"]["alice"]
    assert found["rows_per_s"] == 20 * 20 / 4
    assert found["tokens_per_s"] == {"decode": 2}
    assert found["requests_per_batch"] == 2
    assert found["wait_ms"] == pytest.approx(1)
    assert (found["slo_kept"], found["clients"], found["held_bytes"]) == (0.75, 2, 7)
    assert past["layers"] == {}, "no batch of these layers ran"


def test_an_executor_that_started_again_or_counts_from_zero() -> None:
    before = read(status(at=100.0, alice=tenant(1000)))
    assert between(read(status(at=2.0, alice=tenant(10))), before)["tenants"]["alice"]["rows_per_s"] == 100
    reset = copy.deepcopy(before)
    reset["activity"] |= {"at": 104.0, "batches": 9}
    reset["activity"]["tenants"]["alice"] = {**before["activity"]["tenants"]["alice"], "rows": 80}
    assert between(reset, before)["tenants"]["alice"]["rows_per_s"] == 20


def test_a_tenant_that_is_alone() -> None:
    text = why(alice=tenant(unshared={"alone": {"lone": 6, "no-client-thinking": 4}}))
    assert "0 % of the requests shared a batch" in text
    assert "100 % did not: no other client was at work." in text


def test_a_policy_that_never_waits_and_requests_that_come_apart() -> None:
    unshared = {"thinking": {"at-once": 7}, "passed over": {"at-once": 3}}
    apart = {"5 ms": 3, "10 ms": 0, "25 ms": 9}
    text = why(apart=apart, alice=tenant(unshared=unshared), bob=tenant(unshared=unshared))
    assert "70 % did not: the other clients were computing their own part of the model" in text
    assert "30 % did not: the policy left out a request for the same layers" in text
    assert "it never waits (at-once)" in text
    assert "a quarter came 5 ms or less after another client's, half 25 ms" in text
    assert "queued for 1 ms, and a batch ran for 2 ms" in text


def test_clients_whose_keys_differ() -> None:
    unshared = {"elsewhere": {"no-client-thinking": 10}}
    alice = tenant(unshared=unshared, passes={"forward": 5, "backward": 0})
    text = why(alice=alice, bob=tenant(unshared=unshared, passes={"forward fp32": 3}))
    assert "No two clients asked for the same layers in the same pass and precision" in text
    assert "alice: forward; bob: forward fp32" in text


def test_batches_that_are_shared_need_no_explanation() -> None:
    few = {"thinking": {"deadline": 1}}
    assert why(alice=tenant(20, unshared=few), bob=tenant(20)) == "98 % of the requests shared a batch."


def test_reasons_of_other_policies_and_of_joint_walks_are_shown_as_they_are() -> None:
    text = why(alice=tenant(unshared={"thinking": {"full moon": 10}}, joint=2, alone={"no other client decodes": 9}))
    assert "the policy's reason: full moon." in text
    assert "alice decoded 9 tokens outside joint walks: no other client decodes." in text


def test_blocks_of_several_stacks_have_full_names() -> None:
    found = status(alice=tenant())
    found["activity"]["layers"] = {
        name: {"blocks": 3, "batches": 1}
        for name in ("encoder.block.*.q forward", "decoder.block.*.q forward", "lm_head backward fp32")
    }
    names = [layers["name"] for layers in between(read(found), None)["layers"].values()]
    stacks = [f"{stack}.block.*.q in each of 3 blocks, forward" for stack in ("encoder", "decoder")]
    assert names == [*stacks, "lm_head, backward fp32"]


def test_a_block_that_ran_for_the_first_time_changes_no_rate() -> None:
    """Its layers count together with those of the blocks that ran before."""
    before, later = read(status()), status(at=4.0)
    later["activity"]["layers"]["model.layers.*.q forward"] |= {"blocks": 3, "batches": 12}
    (layers,) = between(read(later), before)["layers"].values()
    assert layers["batches_per_s"] == 1
    assert layers["name"] == "q in each of 3 blocks, forward"


def test_columns_without_content_are_left_out() -> None:
    plain = shown(between(read(status(alice=tenant())), None))
    assert "SLO" not in plain
    assert "service" not in plain
    assert " q in each of 2 blocks, forward " in plain
    both = {"alice": tenant(slo_kept=9, slo_missed=1, service=30.0), "bob": tenant(service=10.0)}
    text = shown(between(read(status(**both)), None))
    assert "90 %" in text
    assert "75 %" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("height", [24, 30, 200])
@pytest.mark.parametrize("width", [80, 140])
def test_a_view_fits_its_screen(width: int, height: int) -> None:
    """The first sentences are there whatever the number of tenants and layers, and no number is cut off."""
    unshared = {"thinking": {"no-gain": 5, "deadline": 4}}
    tenants = {f"customer-{n}": tenant(rows=12345 + n, unshared=unshared, waits={"no-gain": 1.0}) for n in range(30)}
    found = status(**tenants, apart={"1 ms": 3, "10 s": 9})
    layers = found["activity"]["layers"]
    layers |= {f"model.layers.*.{name} forward": dict(layers["model.layers.*.q forward"]) for name in "abcdef"}
    past, text = between(read(found), None), io.StringIO()
    out = Console(file=text, width=width)
    out.print(fitted(past, out, height, "shm:///s"))
    lines = text.getvalue().splitlines()
    assert len(lines) <= height
    said = " ".join(text.getvalue().split())
    assert all(" ".join(sentence.split()) in said for sentence in past["why"][: None if height > 30 else 2])
    assert "in each of 2 blocks" in said
    assert said.count("customer-") >= 5
    assert "6,187" in said, "the rows of the busiest tenant per second"
    assert "customer-29" in said
    assert ("tenants more" in said) is (height < 200)


def test_a_screen_shows_the_latest_view_in_place_on_a_terminal_and_below_elsewhere() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        with screen(Console(file=out, width=80, force_terminal=terminal)) as show:
            show("first\nfirst")
            show("second")
        assert ("\x1b[1A\x1b[2K" in out.getvalue()) is terminal, "it erases the line above"
        assert "second" in out.getvalue()


def test_a_narrow_screen_shows_figures_beside_long_names() -> None:
    past, text = between(read(status(**{"customer-" + 40 * "x": tenant(rows=12345)})), None), io.StringIO()
    Console(file=text, width=50).print(view(past))
    assert "6,172" in text.getvalue()
    assert "customer-" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 50


def test_large_numbers_are_written_out() -> None:
    alone = {"unshared": {"thinking": {"at-once": 10}}}
    tenants = {"a": tenant(held_bytes=1843 << 20, **alone), "b": tenant(**alone)}
    past = read(status(at=86_400.0, apart={"1 ms": 3}, **tenants))
    past["activity"]["run_s"] = 2.5
    text = " ".join(shown(between(past, None)).split())
    assert "in the last 86,400 s" in text
    assert "1,843 MiB" in text
    assert "a batch ran for 250 ms" in text


def test_a_whole_walk_is_named() -> None:
    now = status(a=tenant())
    counts = now["activity"]["layers"].pop("model.layers.*.q forward")
    now["activity"]["layers"]["model.layers.*.q…lm_head forward"] = {**counts, "blocks": 1}
    assert "model.layers.*.q…lm_head, forward" in shown(between(read(now), None))
