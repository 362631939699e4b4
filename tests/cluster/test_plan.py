"""Decisions about a cluster, and its commands where there is no Ray."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from symbiosis.cluster.plan import NODE_ID, ExecutorId, Model, addresses, changes, reason, selectors
from symbiosis.errors import UsageError
from tests.helpers import command as run_command

MODEL = Model("llama", ("m",), parts=("0", "1"), nodes={"pool": "a"})


def test_numbers_are_not_used_twice() -> None:
    present = [
        ExecutorId("llama", 0, 0),
        ExecutorId("llama", 0, 3),
        ExecutorId("llama", 1, 1),
        ExecutorId("other", 0, 9),
    ]
    start, end = changes(MODEL, 3, present)
    assert start == [ExecutorId("llama", 0, 4), ExecutorId("llama", 1, 2), ExecutorId("llama", 1, 3)]
    assert end == []
    assert changes(MODEL, 1, present) == ([], [ExecutorId("llama", 0, 3)])
    assert changes(Model("gpt2", ()), 1, present) == ([ExecutorId("gpt2", 0, 0)], [])


def test_a_tenant_takes_so_many_addresses() -> None:
    model = Model("llama", (), parts=("0-15", "16-31"))
    assert len(changes(model, 32, [])[0]) == 64
    with pytest.raises(UsageError, match="66 executors; a tenant takes up to 64"):
        changes(model, 33, [])


def test_executors_that_do_not_serve_end_first() -> None:
    present = [ExecutorId("llama", part, number) for part in (0, 1) for number in (0, 1, 2)]
    start, end = changes(MODEL, 1, present, {"llama/0/1", "llama/0/2", "llama/1/0"})
    assert start == []
    assert list(map(str, end)) == ["llama/0/2", "llama/0/0", "llama/1/1", "llama/1/2"]


@pytest.mark.parametrize("name", ["directory", "a/b/c", "a/0", "/0/0"])
def test_names_of_other_actors(name: str) -> None:
    assert ExecutorId.of(name) is None


def test_a_place_has_its_name() -> None:
    assert ExecutorId.of(str(ExecutorId("llama-3.2", 1, 12))) == ExecutorId("llama-3.2", 1, 12)


def test_replicas_prefer_nodes_of_their_own() -> None:
    assert selectors(MODEL, [], [], ["n1", "n2"]) == [{"pool": "a"}]
    assert selectors(MODEL, [], ["n1"], ["n1", "n2"]) == [{"pool": "a", NODE_ID: "!in(n1)"}, {"pool": "a"}]
    assert selectors(MODEL, ["n2"], ["n1"], ["n1", "n2"]) == [{"pool": "a", NODE_ID: "!in(n2)"}]
    assert [each[NODE_ID] for each in selectors(MODEL, ["n3"], ["n1"], ["n1", "n2", "n3"])] == ["!in(n1,n3)", "!in(n3)"]


def test_tenants_get_executors_that_serve() -> None:
    reports = {
        "llama/0/0": {"model": "llama", "state": "serving", "address": "tcp://a:1", "at": 0.0},
        "llama/0/1": {"model": "llama", "state": "serving", "address": "tcp://b:1", "at": 95.0},
        "llama/0/2": {"model": "llama", "state": "loading", "address": "tcp://c:1", "at": 100.0},
        "gpt2/0/0": {"model": "gpt2", "state": "serving", "address": "tcp://d:1", "at": 0.0},
    }
    assert addresses(reports, "llama", 100.0, 10.0) == ["tcp://b:1"]
    assert addresses(reports, "llama", 200.0, 10.0) == ["tcp://a:1", "tcp://b:1"]
    assert addresses(reports, "gpt2", 100.0, 10.0) == ["tcp://d:1"]
    assert addresses(reports, "none", 100.0, 10.0) == []


def test_a_part_keeps_its_executors_if_none_of_them_reports() -> None:
    reports = {
        f"llama/{part}/{number}": {"model": "llama", "state": "serving", "address": f"tcp://{part}:{number}", "at": at}
        for part, number, at in ((0, 0, 0.0), (0, 1, 95.0), (1, 0, 0.0))
    }
    assert addresses(reports, "llama", 100.0, 10.0) == ["tcp://0:1", "tcp://1:0"]


def test_the_reason_is_the_error() -> None:
    assert reason("loading\nerror: there is no folder m\nbye", 1) == "there is no folder m"
    assert reason("Traceback\nMemoryError", 1) == "MemoryError"
    assert reason("", 3) == "ended with status 3"


def test_the_reason_may_be_a_signal() -> None:
    assert reason("", -9).startswith("ended by signal 9 (Killed")
    assert re.fullmatch(r"ended by signal 9 \(Killed.*\), after: serving llama", reason("serving llama", -9))


@pytest.mark.parametrize("command", [("status",), ("drain", "n1"), ("scale", "llama", "2"), ("down",)])
def test_without_ray(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run_command("cluster", *command)
    assert result.exit_code == 1
    assert "a cluster needs Ray; pip install 'symbiosis-peft[ray]'" in result.stderr


def test_what_cannot_be_submitted(tmp_path: Path) -> None:
    other = run_command("submit", "generate", "tcp://a:1")
    assert (other.exit_code, "'generate' cannot be submitted" in other.stderr) == (1, True)
    no_data = run_command("submit", "finetune", "tcp://a:1", "--output", "o")
    assert (no_data.exit_code, "--data is missing" in no_data.stderr) == (1, True)
    assert run_command("submit", "finetune", "tcp://a:1", "--no-such-option").exit_code == 2
