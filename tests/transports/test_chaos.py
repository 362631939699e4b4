"""Clients and executors are killed at random for a minute, with tenants of mixed kinds over shm:// and tcp://."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from symbiosis.core.registry import make_transport
from tests.service import Service, free_port, save_model

KILLS = 12
KINDS = ["lora", "ia3-async", "prefix", "lora-async", "ia3", "prefix-async"]


class Tenant:
    """A process of a tenant, which is replaced by a new one when it is killed."""

    def __init__(self, address: str, kind: str, checkpoint: Path, folder: Path, *key: str) -> None:
        self._command = [sys.executable, "-W", "ignore", "-m", "tests.chaos_job", address, kind, str(checkpoint), *key]
        self._errors = folder / f"{kind}.err"
        self.killed = 0
        self.start()

    def start(self) -> None:
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.killed += 1
        self.start()

    def finish(self) -> int:
        """Let the process end its job, and return the number of jobs that it has done."""
        out, _ = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, self._errors.read_text()[-3000:]
        return len(out.splitlines())

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def descriptors(pid: int) -> int:
    return psutil.Process(pid).num_fds()


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_chaos(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=2)
    folder = tmp_path / "sockets"
    folder.mkdir()
    shm, tcp = f"shm://{folder}/s.sock", f"tcp://127.0.0.1:{free_port()}"
    rng = random.Random(0)
    with (
        Service(checkpoint, shm, "--listen", tcp, log=tmp_path / "service.log", fresh=True) as service,
        ExitStack() as stack,
    ):
        tenants = [
            Tenant((shm, tcp)[index % 2 if index < 4 else index // 2 % 2], kind, checkpoint, tmp_path)
            for index, kind in enumerate(KINDS)
        ]
        for tenant in tenants:
            stack.callback(tenant.close)
        for victim in rng.sample(["service", "tenant"], KILLS, counts=[KILLS // 2] * 2):
            time.sleep(rng.uniform(3, 6))
            if victim == "service":
                service.kill()
                service.start()
            else:
                rng.choice(tenants).kill()
        done = [tenant.finish() for tenant in tenants]
        assert all(done), done
        assert sum(tenant.killed for tenant in tenants) == KILLS // 2
        # The executor keeps nothing of any tenant. A new status connection leaves nothing behind either.
        look = make_transport(shm).look
        deadline = time.monotonic() + 30
        while look(shm).status["clients"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert look(shm).status["clients"] == []
        assert look(shm).status["outstanding"] == 0
        pid = service.pid
        before, memory = descriptors(pid), psutil.Process(pid).memory_full_info().uss
        for kind in KINDS[:2]:
            visitor = Tenant((shm, tcp)[KINDS.index(kind)], kind, checkpoint, tmp_path)
            visitor.finish()
        time.sleep(2)
        assert descriptors(pid) <= before + 1
        assert psutil.Process(pid).memory_full_info().uss < memory + (64 << 20)
        assert [path.name for path in folder.iterdir()] == ["s.sock"]
        assert service.stop() == 0
    assert not list(folder.iterdir())
    assert not [entry for entry in Path("/dev/shm").iterdir() if "symbiosis" in entry.name]
