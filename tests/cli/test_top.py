"""``symbiosis top`` and ``symbiosis demo --watch``, on executors in processes of their own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.cli import serve
from symbiosis.errors import ExecutorClosedError
from tests.helpers import command, losses
from tests.service import Service, save_model

TOP = [sys.executable, "-m", "symbiosis", "top"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Service]:
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock", "--policy", "no-lockstep") as running:
        yield running


@pytest.fixture
def two_train(service: Service) -> Iterator[None]:
    """Two tenants train until the test has ended."""
    ended = threading.Event()

    def train(name: str) -> None:
        from peft import LoraConfig, get_peft_model

        with symbiosis.open_model(service.address, name=name) as model:
            tuned = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
            while not ended.is_set():
                losses(tuned, 1)

    tenants = [threading.Thread(target=train, args=(name,)) for name in ("alice/1", "bob")]
    for tenant in tenants:
        tenant.start()
    yield
    ended.set()
    for tenant in tenants:
        tenant.join(60)


def until_at_work(address: str) -> dict[str, Any]:
    """Return what two tenants did in one interval, once both are at work."""
    end = time.monotonic() + 60
    while True:
        shown = command("top", address, "--once", "--json", "--interval", "0.5")
        assert shown.exit_code == 0, shown.output
        found: dict[str, Any] = json.loads(shown.stdout)[address]
        if sum(bool(tenant["tokens_per_s"]) for tenant in found["tenants"].values()) == 2:
            return found
        assert time.monotonic() < end, found


@pytest.mark.usefixtures("two_train")
def test_two_tenants_that_train_at_once_see_why_they_share_nothing(service: Service) -> None:
    found = until_at_work(service.address)
    assert found["requests_per_batch"] == 1
    assert found["tenants"].keys() == {"alice", "bob"}
    for tenant in found["tenants"].values():
        assert tenant["tokens_per_s"].keys() == {"finetune"}
        assert tenant["unshared"] == 1
        assert tenant["held_bytes"] >= 1 << 20
    assert any("it never waits (at-once)" in sentence for sentence in found["why"]), found["why"]
    shown = command("top", service.address, "--once", "--interval", "3")
    assert shown.exit_code == 0
    for text in (
        "7 layers in each of 2 blocks, and lm_head",
        "policy no-lockstep",
        "alice",
        "finetune",
        "self_attn.q_proj",
    ):
        assert text in shown.stdout
    assert "0 % of the requests shared a batch." in shown.stdout
    assert "\x1b" not in shown.stdout


def test_status_leaves_activity_to_top_but_in_json(service: Service) -> None:
    shown = command("status", service.address)
    assert "7 layers in each of 2 blocks, and lm_head" in shown.stdout
    assert "activity" not in shown.stdout
    assert "tenants" in json.loads(command("status", service.address, "--json").stdout)["activity"]


@pytest.mark.parametrize(("value", "text"), [(86_400.4, "86,400"), (0.12345, "0.123"), (12, "12"), ([1, "a"], "1, a")])
def test_values_of_a_status(value: object, text: str) -> None:
    assert serve._text(value) == text


def test_once_fails_where_an_executor_is_away(service: Service, tmp_path: Path) -> None:
    absent = f"shm://{tmp_path}/absent.sock"
    done = command("top", absent, "--once", "--interval", "0.5")
    assert done.exit_code == 1
    assert "is away: " in done.stdout
    done = command("top", f"{absent},{absent}2", "--once", "--interval", "0.5", "--json")
    assert [*json.loads(done.stdout)] == [absent, f"{absent}2"]
    both = command("top", f"{service.address},{absent}", "--once", "--interval", "0.5", "--json")
    assert both.exit_code == 1
    found = json.loads(both.stdout)
    assert found[service.address]["served_layers"] == "7 layers in each of 2 blocks, and lm_head"
    assert "no executor answers" in found[absent]["error"]
    assert command("top", "shm:relative", "--once").exit_code == 1


@pytest.mark.parametrize("looks", [0, 1])
def test_once_fails_where_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    seen: list[str] = []

    class Interrupted:
        def look(self, address: str) -> None:
            if len(seen) == looks:
                signal.raise_signal(signal.SIGINT)
            seen.append(address)
            raise ExecutorClosedError("away")

    monkeypatch.setattr(sys.modules["symbiosis.cli.top"], "make_transport", lambda *_, **__: Interrupted())
    done = command("top", "shm:///absent.sock", "--once", "--interval", "0.5")
    assert (done.exit_code, done.stdout) == (130, "")


def test_it_goes_on_when_the_executor_returns(checkpoint: Path, tmp_path: Path) -> None:
    running = Service(checkpoint, f"shm://{tmp_path}/s.sock")
    with subprocess.Popen([*TOP, running.address, "--json", "--interval", "0.5"], stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        try:
            assert "error" in json.loads(top.stdout.readline())[running.address]
            with running:
                while "error" in (found := json.loads(top.stdout.readline())[running.address]):
                    pass
                assert found["why"] == ["No request was answered."]
            while "error" not in json.loads(top.stdout.readline())[running.address]:
                pass
            top.send_signal(signal.SIGINT)
            assert top.wait(20) == 0, "Ctrl-C is the way to end it"
        finally:
            top.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_shows_the_view_in_place_until_a_signal(service: Service, number: signal.Signals) -> None:
    ours, terminal = pty.openpty()
    command = [*TOP, service.address, "--interval", "0.5"]
    env = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    shown, sent = b"", False
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as top:
        os.close(terminal)
        try:
            while data := _read(ours):
                shown += data
                if not sent and shown.count(b"no-lockstep") > 2:
                    top.send_signal(number)
                    sent = True
            assert top.wait(20) == (0 if number == signal.SIGINT else 128 + number), shown.decode()
        finally:
            top.kill()
            os.close(ours)
    assert b"\x1b[?25h" in shown, "the cursor is shown again"
    assert b"Traceback" not in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""
