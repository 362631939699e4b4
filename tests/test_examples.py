"""The examples run in processes of their own and print the expected output."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from symbiosis.core.registry import make_transport
from symbiosis.errors import SymbiosisError
from tests.service import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"
NOISE = re.compile(r"torchao|_pytree|kernels-community")
"""What torchao and bitsandbytes print when transformers finds them installed."""
EXPECTED = {
    "embed_in_service.py": [
        "alice: [",
        "mallory: 400",
        "bob: 400",
        "['alice']: 400",
        '"mean_batch"',
        "trainer took",
        "has ended",
    ],
}


def test_every_example_is_tested() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if not NOISE.search(line)] == []
    for words in EXPECTED[name]:
        assert words in result.stdout


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_placement(tmp_path: Path) -> None:
    """The commands of the example's page, as they are but for the folder and the port. The executor that the client
    uses is killed while it trains; its losses are those of a client that nothing happens to."""
    text = (EXAMPLES / "placement" / "README.md").read_text().replace("python ", f"{sys.executable} ")
    text = text.replace("/tmp/", f"{tmp_path}/").replace("7010", str(free_port()))
    commands = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    make, *serve, train = (shlex.split(line) for line in commands)
    subprocess.run(make, check=True, capture_output=True, timeout=100)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:
        executors = []
        for line in serve:
            executors.append(subprocess.Popen([sys.executable, "-m", "symbiosis", *line[1:]], **quiet))
            stack.callback(executors[-1].wait, 20)
            stack.callback(executors[-1].kill)
        addresses = train[-1]
        end = time.monotonic() + 120
        while not all_answer(addresses):
            assert time.monotonic() < end
            time.sleep(0.2)
        losses = []
        for victim in (None, executors[1]):
            client = subprocess.Popen([*train, "10"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(client.kill)
            assert client.stdout is not None
            first = [client.stdout.readline() for _ in range(3)]
            if victim is not None:
                victim.kill()
            out, _ = client.communicate(timeout=100)
            assert client.returncode == 0
            losses.append([*first, *out.splitlines(keepends=True)[:-3]])
        assert len(losses[0]) == 10
        assert losses[0] == losses[1]
        assert "no executor answers" in out.splitlines()[-2]
        assert "requests" in out.splitlines()[-1]


def all_answer(addresses: str) -> bool:
    try:
        states = make_transport(addresses).look(addresses).status["replicas"]
    except SymbiosisError:
        return False
    return not any("error" in state for state in states.values())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = (EXAMPLES / "deploy" / "symbiosis.service").read_text()
    command = str(Path(sys.executable).with_name("symbiosis"))  # which has to exist
    (tmp_path / "symbiosis.service").write_text(unit.replace("/opt/symbiosis/bin/symbiosis", command))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "symbiosis.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
