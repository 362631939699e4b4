"""Executors and jobs on three nodes of Ray, which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import symbiosis
from symbiosis.cli.cluster_config import read_plan
from symbiosis.errors import BrokenError, ConnectionLostError, UsageError
from symbiosis.transports.keys import new_key
from tests.cluster.nodes import COMMAND, COMMAND_S, Nodes, processes, started, until
from tests.helpers import IDS
from tests.service import WORDS, Service, free_port, save_model
from tests.transports.test_chaos import Tenant

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
pytest.importorskip("ray", reason="needs the extra symbiosis-peft[ray]")

KILLS = int(os.environ.get("CLUSTER_KILLS", "4"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(3 * COMMAND_S + 40 * KILLS),
    pytest.mark.filterwarnings("ignore"),  # of Ray and what it imports
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with started(monkeypatch) as made:
        yield made


def config(folder: Path, model: Path, *lines: str) -> tuple[Path, str]:
    """Write a file for ``cluster up``, and return it with the address of its model."""
    port = free_port()
    file = folder / "cluster.toml"
    top = [f'directory = "127.0.0.1:{port}"', *lines[:-1]]
    file.write_text("\n".join([*top, "[[model]]", 'name = "llama"', f'model = "{model}"', lines[-1]]))
    return file, f"http://127.0.0.1:{port}/llama"


def test_tenants_go_on_when_processes_and_nodes_are_killed(nodes: Nodes, tmp_path: Path) -> None:
    """Executors, their actors, the directory and nodes are killed at random moments. Each result of two tenants, which
    train and generate, is that of a plain run. In the end all nodes are killed, and a tenant gets one error."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    keys = tmp_path / "keys"
    new_key(keys, "server")
    key = str(new_key(keys, "alice"))
    file, address = config(tmp_path, model, f'keys = "{keys}"', "replicas = 2")
    nodes.symbiosis("cluster", "up", str(file))
    assert len({each["node_id"] for each in nodes.executors()}) == 2
    rng = random.Random(0)
    kinds = ["executor", "actor", "node", "directory"]
    victims = [kind for _ in range(-(-KILLS // len(kinds))) for kind in rng.sample(kinds, len(kinds))]
    with contextlib.ExitStack() as stack:
        tenants = [Tenant(address, kind, model, tmp_path, key) for kind in ("lora", "ia3-async")]
        for tenant in tenants:
            stack.callback(tenant.close)
        for victim in victims[:KILLS]:
            time.sleep(rng.uniform(4, 10))
            if victim == "node":
                used = [nodes.of(each) for each in processes("serve")] or nodes.nodes
                nodes.kill(rng.choice(used))
                nodes.add()
            elif victim == "directory":
                for process in processes("ray::DirectoryActor"):
                    process.kill()
            elif found := processes("serve"):
                process = rng.choice(found)
                (process if victim == "executor" else process.parent()).kill()
        jobs = [tenant.finish() for tenant in tenants]
        assert all(jobs)
    until(lambda: all(each["state"] == "serving" for each in nodes.executors()), COMMAND_S)

    with symbiosis.open_model(address, key=key, retry=4.0) as opened:
        assert opened(IDS).logits.isfinite().all()
        for node in list(nodes.nodes):
            nodes.kill(node)
        began = time.monotonic()
        with pytest.raises(ConnectionLostError, match="did not come back"):
            opened(IDS)
        assert 3 < time.monotonic() - began < 30


def test_commands(nodes: Nodes, tmp_path: Path) -> None:
    """A tenant trains while executors of two parts are added, drained and removed. Errors change nothing."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    keys = tmp_path / "keys"
    new_key(keys, "server")
    key = str(new_key(keys, "alice"))
    lines = (f'keys = "{keys}"', 'parts = ["0", "1,lm_head"]\nnum-cpus = 0.5\nnodes = { pool = "a" }')
    wrong, _ = config(tmp_path, tmp_path / "missing", *lines)
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr
    failed = nodes.symbiosis("cluster", "up", str(wrong), status=1).stderr
    assert "cannot serve: there is no folder" in failed
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr
    file, address = config(tmp_path, model, *lines)
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen([*COMMAND, "cluster", "up", str(file)], env=nodes.environment) as interrupted:
            until(lambda: processes("serve"), COMMAND_S)
            interrupted.send_signal(number)
            assert interrupted.wait(COMMAND_S) == 130
        until(lambda: not processes("serve"), 20)
    assert nodes.symbiosis("cluster", "up", str(file)).stdout == f"llama: {address}\n"
    assert "change it with scale" in nodes.symbiosis("cluster", "up", str(file), status=1).stderr
    with contextlib.ExitStack() as stack:
        tenant = Tenant(address, "lora", model, tmp_path, key)
        stack.callback(tenant.close)
        nodes.symbiosis("cluster", "scale", "llama", "2")
        executors = nodes.executors()
        assert [each["layers"] for each in executors] == ["0", "0", "1,lm_head", "1,lm_head"]
        assert len({each["node_id"] for each in executors[:2]}) == 2
        leave = executors[0]["node_id"]
        nodes.symbiosis("cluster", "drain", leave)
        after = nodes.executors()
        assert len(after) == 4
        assert {leave} | {each["node_id"] for each in after} == {node.node_id for node in nodes.nodes[:2]}
        assert "is the name of 0 nodes" in nodes.symbiosis("cluster", "drain", "nowhere", status=1).stderr
        no_room = nodes.symbiosis("cluster", "scale", "llama", "9", status=1).stderr
        assert "no node has room for llama/" in no_room
        nodes.symbiosis("cluster", "scale", "llama", "1")
        assert {each["name"] for each in nodes.executors()} < {each["name"] for each in after}
        nodes.symbiosis("cluster", "scale", "llama", "2")
        assert len(nodes.executors()) == 4, "executors with the names of those that ended serve"
        assert tenant.finish() > 0
    nodes.symbiosis("cluster", "down")
    assert not processes("serve")
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr


def test_a_directory_that_starts_too_late_is_told_as_that(nodes: Nodes, tmp_path: Path) -> None:
    from symbiosis.cluster.manage import ClusterManager

    file, _ = config(tmp_path, save_model(tmp_path / "model"), "replicas = 1")
    manager = ClusterManager(nodes.environment["RAY_ADDRESS"])
    try:
        with pytest.raises(BrokenError, match=r"the directory did not start within 0\.001 s; raise --within"):
            manager.up(read_plan(file), 0.001)
    finally:
        manager.close()
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr


def test_nothing_stays_reserved_after_commands_that_did_not_end(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither after an interrupt while executors end, nor for an executor whose actor was never started."""
    from ray.util import placement_group

    from symbiosis.cluster import manage, running

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    file, _ = config(tmp_path, save_model(tmp_path / "model"), "insecure = true", "replicas = 2")
    manager = manage.ClusterManager(nodes.environment["RAY_ADDRESS"])
    try:
        manager.up(read_plan(file), COMMAND_S)
        assert len(running.places()) == 2
        with monkeypatch.context() as patch:
            patch.setattr(manage.ray, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.down()
        until(lambda: not processes("serve"), 20)
        assert reserved() == []
        assert "all     missing" in nodes.symbiosis("cluster", "status", status=1).stdout
        placement_group([{"CPU": 1}], name="llama/0/3", lifetime="detached")
        assert [each["state"] for each in nodes.executors()] == ["waiting"]
        manager.down()
        assert reserved() == []
    finally:
        manager.close()


def test_scale_keeps_executors_that_serve(nodes: Nodes, tmp_path: Path) -> None:
    import ray

    from symbiosis.cluster import manage, running

    file, _ = config(tmp_path, save_model(tmp_path / "model"), "insecure = true", "replicas = 2")
    manager = manage.ClusterManager(nodes.environment["RAY_ADDRESS"])
    try:
        manager.up(read_plan(file), COMMAND_S)
        ray.kill(ray.get_actor("llama/0/0"))
        running.asked("forget", ["llama/0/0"])
        manager.scale("llama", 1, COMMAND_S)
        assert list(map(str, running.places())) == ["llama/0/1"]
        manager.down()
    finally:
        manager.close()


def test_a_drained_node_stays_drained_when_the_directory_starts_again(nodes: Nodes, tmp_path: Path) -> None:
    from symbiosis.cluster import manage, running

    lines = ("insecure = true", 'num-cpus = 2\nnodes = { pool = "a" }')
    file, _ = config(tmp_path, save_model(tmp_path / "model"), *lines)
    manager = manage.ClusterManager(nodes.environment["RAY_ADDRESS"])
    try:
        manager.up(read_plan(file), COMMAND_S)
        (used,) = nodes.executors()
        (free,) = (node.node_id for node in nodes.nodes[:2] if node.node_id != used["node_id"])
        manager.drain(free, COMMAND_S)
        (directory,) = processes("ray::DirectoryActor")
        directory.kill()
        directory.wait(20)
        assert running.status()["drained"] == [free]
        with pytest.raises(UsageError, match="no node has room for llama/0/1"):
            manager.scale("llama", 2, COMMAND_S)
        manager.down()
    finally:
        manager.close()


def reserved() -> list[str]:
    from ray.util import placement_group_table

    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_a_job_resumes_at_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """The node of a fine-tuning job is killed. Its losses are those of a run that nothing happens to."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "the cat", "completion": f"sat on {word}"}) + "\n" for word in WORDS))
    with Service(model, f"tcp://127.0.0.1:{free_port()}", fresh=True) as service:
        run = ["finetune", service.address, "--data", str(data), "--every", "5", "--steps", "120", "--output"]
        nodes.symbiosis(*run, str(tmp_path / "expected"))
        job = subprocess.Popen(
            [*COMMAND, "submit", *run, str(tmp_path / "lost")],
            env=nodes.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        with job:
            until(lambda: (tmp_path / "lost" / "checkpoint-10" / "trainer_state.json").exists(), COMMAND_S)
            (process,) = processes("symbiosis.terminal.child", "finetune")
            before = nodes.of(process)
            nodes.kill(before)
            assert not process.is_running()
            found = until(lambda: processes("symbiosis.terminal.child", "finetune"), COMMAND_S)
            assert nodes.of(found[0]) is not before
            out, _ = job.communicate(timeout=COMMAND_S)
        assert job.returncode == 0, out
        assert "in 120 steps" in out
        assert losses_in(tmp_path / "lost") == losses_in(tmp_path / "expected")
        assert "--data none: give a file" in nodes.symbiosis("submit", *run[:3], "none", *run[4:], "x", status=1).stdout


def losses_in(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands of the example's page, as they are but for folder and port. An executor is killed meanwhile."""
    monkeypatch.chdir(ROOT)
    for name in ("cluster.toml", "README.md"):
        text = (ROOT / "examples" / "placement" / "ray" / name).read_text()
        text = text.replace("examples/placement/ray/cluster.toml", f"{tmp_path}/cluster.toml")
        (tmp_path / name).write_text(text.replace("/tmp/tutorial", f"{tmp_path}/t").replace("7070", str(free_port())))
    address = re.findall(r"http://\S+", (tmp_path / "README.md").read_text())[0]
    port = address.rpartition("/")[0].rpartition(":")[2]
    file = tmp_path / "cluster.toml"
    file.write_text(re.sub(r'directory = "127.0.0.1:\d+"', f'directory = "127.0.0.1:{port}"', file.read_text()))
    blocks = re.findall(r"```\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    start, *prepare, up, status, submit, drain, down = [line for block in blocks for line in block.splitlines()]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    environment = {**os.environ, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(line: str) -> str:
        return subprocess.run(
            shlex.split(line), env=environment, stdout=subprocess.PIPE, text=True, timeout=COMMAND_S, check=True
        ).stdout

    with subprocess.Popen(shlex.split(start), env=environment, stdout=subprocess.PIPE, text=True) as ray:
        assert ray.stdout is not None
        try:
            environment["RAY_ADDRESS"] = ray.stdout.readline().split()[-1]
            for line in prepare:
                run(line)
            assert run(up) == f"llama: {address}\n"
            assert run(status).count("serving") == 2
            with subprocess.Popen(shlex.split(submit), env=environment, stdout=subprocess.PIPE, text=True) as job:
                until(lambda: list(tmp_path.glob("t/adapter/checkpoint-*")), COMMAND_S)
                state = json.loads(run(f"{status} --json"))["models"]["llama"]["executors"]
                os.kill(state[0]["pid"], signal.SIGKILL)
                run(drain)
                out, _ = job.communicate(timeout=COMMAND_S)
            assert job.returncode == 0
            assert "adapter in" in out
            run(down)
            left = psutil.Process(ray.pid).children(recursive=True)
        finally:
            ray.send_signal(signal.SIGINT)
            ray.wait(COMMAND_S)
            shutil.rmtree(folder, ignore_errors=True)
    assert not psutil.wait_procs(left, timeout=20)[1]
