"""An executor that shuts down in good order: walks that have begun end, and clients go on elsewhere or later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

import symbiosis
from symbiosis.errors import ExecutorClosedError, SymbiosisError
from symbiosis.testing import Job, run_job, run_job_plain, tiny_model
from tests.helpers import HANGS, assert_close, lora, losses, until
from tests.service import Service, free_port, save_model

JOB = Job(steps=6)


async def test_clients_go_on_at_a_replica_without_losing_a_call(tmp_path: Path) -> None:
    expected = run_job_plain(tiny_model(), lora(), JOB)
    one, other = symbiosis.Executor(tiny_model()), symbiosis.Executor(tiny_model())
    addresses = [f"shm://{tmp_path}/{name}.sock" for name in ("one", "other")]
    async with one, other:
        await one.listen(addresses[0])
        await other.listen(addresses[1])
        async with symbiosis.connect(",".join(addresses)) as base, base.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, JOB))
            await until(lambda: one.statistics().requests > 40)
            assert await one.drain(20)
            assert one.status()["draining"]
            asked = one.statistics().requests
            assert_close(await job, expected)
            assert one.statistics().requests == asked, "nothing ran there after its walks had ended"
        assert other.statistics().requests
        assert not one.statistics().rejections


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_clients_wait_for_the_executor_to_return(scheme: str, tmp_path: Path) -> None:
    expected = run_job_plain(tiny_model(), lora(), JOB)
    address = f"shm://{tmp_path}/s.sock" if scheme == "shm" else f"tcp://127.0.0.1:{free_port()}"
    one, other = symbiosis.Executor(tiny_model()), symbiosis.Executor(tiny_model())
    async with one, other:
        await one.listen(address)
        async with symbiosis.connect(address, retry=30) as base, base.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, JOB))
            await until(lambda: one.statistics().requests > 40)
            assert await one.drain(20)
            await one.close()
            await asyncio.sleep(0.2)
            await other.listen(address)
            assert_close(await job, expected)


async def test_who_is_told_that_it_shuts_down_is_not_counted_as_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients ask again and again until the executor returns."""
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(tiny_model()) as executor:
        await executor.listen(address)
        assert await executor.drain(20)
        with pytest.raises(SymbiosisError, match="shutting down"):
            async with symbiosis.connect(address, retry=0) as base, base.client(lora()):
                pass
        assert not executor.statistics().rejections
        assert "client refused" not in caplog.text


async def test_no_client_joins_and_clients_of_this_process_go_on() -> None:
    async with symbiosis.Executor(tiny_model()) as executor, executor.client(lora(), seed=0) as client:
        assert await executor.drain(20)
        assert_close(await run_job(client, JOB), run_job_plain(tiny_model(), lora(), JOB))
        with pytest.raises(ExecutorClosedError, match="shutting down"):
            executor.service.join("alice")


async def test_a_walk_that_does_not_end_is_waited_for_no_longer_than_said() -> None:
    async with symbiosis.Executor(tiny_model()) as executor:
        session = executor.service.join("alice")
        session.begin_walk()
        async with asyncio.timeout(5):
            assert not await executor.drain(0.1)
        session.end_walk()
        assert await executor.drain(0.1)


def test_sigterm_lets_a_step_end(tmp_path: Path) -> None:
    """A client between two walks waits for the next executor. Its losses are those of an undisturbed run."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    with Service(model, f"shm://{tmp_path}/s.sock") as running:

        def trained(at: int = -1, then: Any = None) -> list[float]:
            with symbiosis.open_model(running.address, retry=60) as opened:
                torch.manual_seed(0)
                return losses(get_peft_model(opened, lora()), 5, at, then)

        def restart() -> None:
            assert running.stop() == 0
            running.start()

        expected = trained()
        assert trained(2, restart) == expected
        assert "shutting down when all walks have ended" in running.log


@pytest.mark.thorough
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """A client hangs in a walk, so one signal waits for 15 s."""
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Service(model, f"shm://{tmp_path}/s.sock", fresh=True))
        hanging = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HANGS, running.address], stdout=subprocess.PIPE, text=True
        )
        stack.enter_context(hanging)
        stack.callback(hanging.kill)
        assert hanging.stdout is not None
        assert hanging.stdout.readline().strip() == "there"
        began = time.monotonic()
        os.kill(running.pid, signal.SIGTERM)
        while "shutting down when" not in running.log:
            time.sleep(0.05)
        time.sleep(1)
        assert "client left" not in running.log, "the executor waits for the walk"
        assert running.stop() == 0
        assert time.monotonic() - began < 10
