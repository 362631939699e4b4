"""``symbiosis serve --config``, and mistakes that are reported before a model is loaded."""

from __future__ import annotations

import logging
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from symbiosis.cli import serve as serve_command
from symbiosis.cli.commands import app
from symbiosis.executor import loaded
from symbiosis.transports.limits import Limits
from tests.service import Service, free_port, save_model

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "deploy" / "serve.toml"


class Metrics(str):
    """Stands for the server of an address."""

    def close(self) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``symbiosis serve`` would serve, in place of serving it."""
    found: dict[str, Any] = {}

    async def serve(
        model: str,
        addresses: dict[str, dict[str, Any]],
        keep_weights: bool | None,
        trace: Path | None,
        metrics: Any,
        reloader: Any,
        **settings: Any,
    ) -> None:
        found.update(settings, model=model, addresses=addresses, keep_weights=keep_weights, trace=trace)
        found.update(metrics=metrics, reloader=reloader)

    monkeypatch.setattr(serve_command, "_serve", serve)
    monkeypatch.setattr("symbiosis.cli.metrics.MetricsServer", Metrics)
    monkeypatch.setattr("symbiosis.log.render", lambda json: None)
    monkeypatch.setattr(logging.getLogger("symbiosis"), "propagate", True)  # another test may have called it
    monkeypatch.setenv("COLUMNS", "200")
    return found


def run(tmp_path: Path, text: str, *arguments: str, status: int = 0) -> str:
    (tmp_path / "serve.toml").write_text(text)
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.toml"), *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_every_option_can_come_from_the_file(tmp_path: Path, served: dict[str, Any]) -> None:
    port = free_port()
    run(
        tmp_path,
        f"""
        model = "some/model"
        listen = ["tcp://0.0.0.0:{port}", "shm://{tmp_path}/s.sock"]
        policy = "fair+opportunistic"
        base-layers = "mlp"
        insecure = true
        device = "cpu"
        dtype = "bf16"
        max-rows = 64
        max-bytes = 1_000_000_000
        packed = false
        allow-weights = ["lm_head"]
        layers = "0-1"
        shards = 2
        keep-weights = false
        name = "ours"
        trace = "{tmp_path}/trace.json"
        metrics = "127.0.0.1:9400"
        log-format = "json"
        [limits]
        calls = 3
        rows = 1_000
        """,
    )
    limits = {"limits": Limits(calls=3, rows=1000)}
    del served["reloader"]
    assert served == {
        "model": "some/model",
        "addresses": {f"tcp://0.0.0.0:{port}": {**limits, "insecure": True}, f"shm://{tmp_path}/s.sock": limits},
        "policy": "fair+opportunistic",
        "base_layers": "mlp",
        "device": "cpu",
        "dtype": "bf16",
        "max_rows": 64,
        "max_bytes": 1_000_000_000,
        "packed": False,
        "allow_weights": ["lm_head"],
        "layers": "0-1",
        "shards": 2,
        "keep_weights": False,
        "model_name": "ours",
        "trace": tmp_path / "trace.json",
        "metrics": "127.0.0.1:9400",
    }


def test_the_command_line_wins(tmp_path: Path, served: dict[str, Any]) -> None:
    text = (
        f'model = "a"\nlisten = ["shm://{tmp_path}/a.sock"]\npolicy = "lockstep"\npacked = false\n[limits]\ncalls = 3'
    )
    run(tmp_path, text, "b", "--listen", f"shm://{tmp_path}/b.sock", "--packed", "--limit", "rows=9")
    assert (served["model"], served["packed"], served["policy"]) == ("b", True, "lockstep")
    assert served["addresses"] == {f"shm://{tmp_path}/b.sock": {"limits": Limits(rows=9)}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("polcy = 'fair'", "unknown key 'polcy'; did you mean policy"),
        ("base_layers = 'mlp'", "unknown key 'base_layers'; did you mean base-layers"),
        ("limit = ['calls=3']", "did you mean limits"),
        ("zzz = 1", "known are allow-weights, base-layers"),
        ("listen = 'tcp://127.0.0.1:0'", "listen is 'tcp://127.0.0.1:0'; give a list of texts"),
        ("policy = ['fair']", "policy is ['fair']; give a value"),
        ("limits = 3", "limits is a table"),
        ("[policy]\nfair = 1", "policy is a table"),
        ("[limits]\ncals = 3", "the names are calls, rows"),
        ("max-rows = 0", "serve.toml: max-rows = 0: Input should be greater"),
        ("max-rows = true", "max-rows = True: Input should be a valid integer"),
        ("packed = 'maybe'", "packed = maybe: Input should be a valid boolean"),
        ("= 3", "Invalid statement (at line 1, column 1)"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, served: dict[str, Any], text: str, reason: str) -> None:
    arguments = ["model"] if "listen" in text else ["model", "--listen", "tcp://127.0.0.1:0"]
    assert reason in " ".join(run(tmp_path, text, *arguments, status=1).split())
    assert not served


class Limited:
    """An executor that keeps the limits that it is given."""

    given: tuple[Limits, int] | None = None

    def limit(self, limits: Limits, max_bytes: int) -> None:
        self.given = limits, max_bytes


def test_reloaded_limits(tmp_path: Path, served: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Limits of the file change; what the command line says stays; other changes are named."""
    caplog.set_level("INFO", "symbiosis.cli.reload")
    address = "--listen", "tcp://127.0.0.1:0"
    run(tmp_path, "model = 'a'\n[limits]\ncalls = 3", *address, "--max-bytes", "1_000_000_000".replace("_", ""))
    executor = Limited()
    (tmp_path / "serve.toml").write_text("model = 'a'\npolicy = 'fair'\nmax-bytes = 200_000_000\n[limits]\ncalls = 4")
    served["reloader"].apply(executor)
    assert executor.given == (Limits(calls=4), 1_000_000_000)
    restart, reloaded = caplog.records
    assert (restart.message, vars(restart)["keys"]) == ("changes need a restart", "policy")
    assert (reloaded.message, vars(reloaded)["calls"]) == ("limits reloaded", "3 → 4")
    assert not hasattr(reloaded, "max_bytes")
    caplog.clear()
    served["reloader"].apply(executor)
    assert [record.message for record in caplog.records] == ["changes need a restart", "limits reloaded"]
    assert vars(caplog.records[1])["changed"] == "nothing"
    caplog.clear()
    (tmp_path / "serve.toml").write_text("model = 'a'")
    served["reloader"].apply(executor)
    assert executor.given == (Limits(), 1_000_000_000)
    assert [record.message for record in caplog.records] == ["limits reloaded"], "the file is as it was at the start"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("= 3", "Invalid statement"),
        ("[limits]\ncalls = 0", "the number is 1 or more"),
        ("max-bytes = 7", "max-bytes"),
        ("policy = 'whim'", "unknown policy"),
        ("max-bytes = 'many'", "max-bytes"),
        ("polcy = 'fair'", "unknown key 'polcy'"),
        ("", "is empty"),
        ("x = " + 5000 * "[", "--config"),
        (f"max-bytes = 0x{'f' * 5000}", "more than 18 digits"),
        (f"[limits]\ncalls = 0x{'f' * 5000}", "more than 18 digits"),
        (f"[limits]\ncalls = '{'9' * 5000}'", "calls"),
    ],
    ids=lambda given: given[:20],
)
def test_a_wrong_file_reloads_nothing(
    tmp_path: Path, served: dict[str, Any], caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    run(tmp_path, "model = 'a'\n[limits]\ncalls = 3", "--listen", "tcp://127.0.0.1:0")
    executor = Limited()
    (tmp_path / "serve.toml").write_text(text)
    served["reloader"].apply(executor)
    assert executor.given is None
    (record,) = caplog.records
    assert reason in vars(record)["why"]
    (tmp_path / "serve.toml").write_text("[limits]\ncalls = 5")
    caplog.set_level("INFO", "symbiosis.cli.reload")
    served["reloader"].apply(executor)
    assert executor.given == (Limits(calls=5), 8 << 30)
    assert vars(caplog.records[-1])["calls"] == "3 → 5"


def test_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert "none.toml: cannot be read (No such file or directory)" in " ".join(result.output.split())


def test_the_example_is_valid(tmp_path: Path, served: dict[str, Any]) -> None:
    """Its addresses and keys are those of a host; here they are others."""
    content = EXAMPLE.read_text()
    for key in ("model", "listen", "keys"):
        assert key in tomllib.loads(content)
    run(tmp_path, content.replace('keys = "/etc/symbiosis/keys"', ""), "--listen", "tcp://127.0.0.1:0")
    assert served["model"] == "/srv/models/llama"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--listen", "tcp://127.0.0.1:BUSY"], "cannot listen on tcp://127.0.0.1:BUSY: Address already in use"),
        (["--listen", "shm://FOLDER/none/s.sock"], "cannot listen on shm://"),
        (["--listen", "shm://FOLDER/file"], "is no socket"),
        (["--listen", "shm://relative.sock"], "write shm:///absolute"),
        (["--listen", "tcp://127.0.0.1"], "write tcp://host:port"),
        (["--listen", "tcp://0.0.0.0:0"], "can be reached from other hosts"),
        (["--listen", "dist://127.0.0.1:0"], "--insecure"),
        (["--listen", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"], "repeat --listen"),
        (["--keys", "FOLDER/none"], "FOLDER/none"),
        (["--trace", "FOLDER/file/trace.json"], "cannot write to"),
        (["--trace", "FOLDER/notes"], "the file exists, and is no trace"),
        (["--device", "nosuch"], "which this machine does not have"),
        (["--dtype", "float33"], "dtype is 'float33'"),
        (["--dtype", "float8_e4m3fn"], "dtype is 'float8_e4m3fn'"),
        (["--name", "x" * 300], "at most 256"),
        (["--policy", "whim"], "unknown policy"),
        (["--listen", "tcp://127.0.0.1:FREE", "--insecure", "--metrics", "127.0.0.1:FREE"], "Address already in use"),
        (
            ["--listen", "tcp://127.0.0.1:FREE", "--insecure", "--listen", "tcp://0.0.0.0:FREE"],
            "Address already in use",
        ),
        (["--listen", "tcp://127.0.0.1:FREE", "--listen", "tcp://localhost:FREE"], "Address already in use"),
        (["--listen", "shm://FOLDER/s.sock", "--listen", "shm://FOLDER/link/s.sock"], "another executor listens there"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(loaded, "load_model", load)
    (tmp_path / "file").write_text("")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        names = {"BUSY": str(busy.getsockname()[1]), "FOLDER": str(tmp_path), "FREE": str(free_port())}
        for name, value in names.items():
            arguments = [each.replace(name, value) for each in arguments]
        if "--listen" not in arguments:
            arguments = [*arguments, "--listen", "tcp://127.0.0.1:0"]
        result = CliRunner().invoke(app, ["serve", "model", *arguments])
    assert result.exit_code == 1, result.output
    assert reason.replace("FOLDER", str(tmp_path)).replace("BUSY", names["BUSY"]) in result.output.replace("\n", " ")


def test_a_socket_in_use_is_reported(tmp_path: Path) -> None:
    """The check of an address leaves the socket of a running executor alone."""
    address = f"shm://{tmp_path}/s.sock"
    with Service(save_model(tmp_path / "model"), address) as service:
        result = CliRunner().invoke(app, ["serve", "nowhere", "--listen", address])
        assert "another executor listens there" in result.output.replace("\n", " ")
        assert CliRunner().invoke(app, ["status", address]).exit_code == 0
        assert service.stop() == 0
