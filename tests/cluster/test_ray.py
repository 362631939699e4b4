"""Executors and jobs on three nodes of Ray, which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.errors import ConnectionLostError
from symbiosis.transports.keys import new_key
from tests.cluster.nodes import COMMAND, Nodes, processes, started, until
from tests.helpers import IDS, TRAINED, lora
from tests.helpers import losses as steps
from tests.service import WORDS, Service, free_port, save_model
from tests.transports.test_chaos import Tenant

pytest.importorskip("ray", reason="needs the extra symbiosis-peft[ray]")

KILLS = int(os.environ.get("CLUSTER_KILLS", "4"))
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(240 + 40 * KILLS),
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
    """Executors, their actors, the directory and nodes are killed at random moments. Each result of a tenant that trains
    and one that generates is that of a plain run. In the end all nodes are killed, and a tenant gets one error."""
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
    until(lambda: all(each["state"] == "serving" for each in nodes.executors()), 60)

    with symbiosis.open_model(address, key=key, retry=4.0) as opened:
        assert opened(IDS).logits.isfinite().all()
        for node in list(nodes.nodes):
            nodes.kill(node)
        began = time.monotonic()
        with pytest.raises(ConnectionLostError):
            opened(IDS)
        assert 3 < time.monotonic() - began < 30


def test_commands(nodes: Nodes, tmp_path: Path) -> None:
    """A tenant trains while executors are added, drained and removed. Errors change nothing."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    lines = ("insecure = true", 'parts = ["0", "1,lm_head"]\nreplicas = 1\nshards = 2\nnum-cpus = 0.5')
    wrong, _ = config(tmp_path, tmp_path / "missing", *lines)
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr
    failed = nodes.symbiosis("cluster", "up", str(wrong), status=1).stderr
    assert "llama/0/0 cannot serve" in failed
    assert "there is no folder" in failed
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr
    file, address = config(tmp_path, model, *lines)
    with subprocess.Popen([*COMMAND, "cluster", "up", str(file)], env=nodes.environment) as interrupted:
        until(lambda: processes("serve"), 60)
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(60) == 130
    until(lambda: not processes("serve"), 20)
    assert nodes.symbiosis("cluster", "up", str(file)).stdout == f"llama: {address}\n"
    assert "change it with scale" in nodes.symbiosis("cluster", "up", str(file), status=1).stderr

    with symbiosis.open_model(address, insecure=True, retry=20.0) as opened:
        torch.manual_seed(0)
        adapted, losses = get_peft_model(opened, lora(lora_dropout=0.0)), list[float]()
        with repeated(lambda: losses.extend(steps(adapted, 1))):
            nodes.symbiosis("cluster", "scale", "llama", "2")
            executors = nodes.executors()
            assert [each["layers"] for each in executors] == ["0", "0", "1,lm_head", "1,lm_head"]
            assert len({each["node_id"] for each in executors[:2]}) == 2
            leave = executors[0]["node_id"]
            nodes.symbiosis("cluster", "drain", leave)
            after = nodes.executors()
            assert len(after) == 4
            assert leave not in {each["node_id"] for each in after}
            no_room = nodes.symbiosis("cluster", "scale", "llama", "20", status=1).stderr
            assert "no node has room for llama/0/" in no_room
            assert nodes.executors() == after
            assert "is the name of 0 nodes" in nodes.symbiosis("cluster", "drain", "nowhere", status=1).stderr
            nodes.symbiosis("cluster", "scale", "llama", "1")
            assert len(nodes.executors()) == 2
            count = len(losses)
            until(lambda: len(losses) > count + 3, 30)
    torch.manual_seed(0)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora(lora_dropout=0.0))
    assert losses[:50] == pytest.approx(steps(plain, min(len(losses), 50)), rel=TRAINED)
    nodes.symbiosis("cluster", "down")
    assert not processes("serve")
    assert "no symbiosis cluster is up" in nodes.symbiosis("cluster", "status", status=1).stderr


@contextlib.contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Do some work again and again on a thread, and raise its error at the end."""
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not errors, errors


def test_a_job_resumes_at_another_node(nodes: Nodes, tmp_path: Path) -> None:
    """The node of a fine-tuning job is killed. Its losses are those of a run that nothing happens to."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "the cat", "completion": f"sat on {word}"}) + "\n" for word in WORDS))
    with Service(model, f"tcp://127.0.0.1:{free_port()}") as service:
        run = ["finetune", service.address, "--data", str(data), "--every", "5", "--steps", "40", "--output"]
        nodes.symbiosis(*run, str(tmp_path / "expected"))
        job = subprocess.Popen(
            [*COMMAND, "submit", *run, str(tmp_path / "lost")],
            env=nodes.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        with job:
            until(lambda: (tmp_path / "lost" / "checkpoint-10" / "trainer_state.json").exists(), 60)
            (process,) = processes("symbiosis.cluster.child", "finetune")
            before = nodes.of(process)
            nodes.kill(before)
            assert not process.is_running()
            found = until(lambda: processes("symbiosis.cluster.child", "finetune"), 60)
            assert nodes.of(found[0]) is not before
            out, _ = job.communicate(timeout=100)
        assert job.returncode == 0, out
        assert "in 40 steps" in out
        assert losses_in(tmp_path / "lost") == losses_in(tmp_path / "expected")
        assert "cannot be read" in nodes.symbiosis("submit", *run[:3], "none", *run[4:], "x", status=1).stdout


def losses_in(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
