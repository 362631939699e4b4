"""Tenants that come and go: ``python -m tests.soak SECONDS [FOLDER]`` prints a line of figures every minute.

An executor in a process of its own serves ``shm://`` and ``tcp://``. Two processes have four tenants each at any time.
A tenant connects, does a job (logits, two generations, training), compares it with plain transformers + PEFT, and
leaves: by closing, without a word in the middle of its job, or, one in fifty, by the death of its whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.errors import ConnectionLostError
from symbiosis.testing import Job, run_job, run_job_plain
from symbiosis.transports.keys import new_key
from tests.helpers import METHODS, assert_close
from tests.service import Service, free_port, save_model

JOB = Job(steps=3, new_tokens=4)
TOGETHER = 4


async def live(address: str, options: dict[str, Any], kind: str, expected: Any, rng: random.Random) -> str:
    """Be one tenant, and return how it left."""
    end = rng.choices(["closed", "vanished", "died"], [78, 20, 2])[0]
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(symbiosis.connect(address, retry=0.0, **options))
        client = await stack.enter_async_context(base.client(METHODS[kind]("llama"), seed=0))
        job = asyncio.ensure_future(run_job(client, JOB))
        if end == "closed":
            assert_close(await job, expected)
            return end
        await asyncio.wait([job], timeout=rng.uniform(0.02, 0.5))
        if end == "died":
            os._exit(9)
        connection: Any = client._channel._connection  # type: ignore[union-attr]
        connection._transport.abort()
        with contextlib.suppress(Exception):
            await job
    return end


def worker(seed: int, folder: Path, shm: str, tcp: str) -> None:
    """Have TOGETHER tenants at any time, and print a letter for each that has left, until killed."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    expected = {kind: run_job_plain(model, METHODS[kind]("llama"), JOB) for kind in METHODS}

    async def one() -> None:
        while True:
            kind = rng.choice(list(METHODS))
            where: tuple[str, dict[str, Any]] = (shm, {})
            if rng.random() < 0.5:
                where = tcp, {"key": folder / "keys" / "alice.secret"}
            try:
                left = await live(*where, kind, expected[kind], rng)
            except ConnectionLostError:  # on a busy machine a handshake may take longer than a second
                left = "lost"
            print(left[0], end="", flush=True)  # noqa: T201

    async def all_of_them() -> None:
        await asyncio.gather(*[one() for _ in range(TOGETHER)])

    asyncio.run(all_of_them())


def main(seconds: float, folder: Path) -> None:
    save_model(folder / "model", num_hidden_layers=2)
    for name in ("server", "alice"):
        new_key(folder / "keys", name)
    shm, tcp = f"shm://{folder}/s.sock", f"tcp://127.0.0.1:{free_port()}"
    numbers = itertools.count()
    workers: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    lives, deaths = "", 0

    def start() -> None:
        number = next(numbers)
        out, errors = folder / f"{number}.out", folder / f"{number}.err"
        command = [sys.executable, "-W", "ignore", "-m", "tests.soak", "worker", str(number), str(folder), shm, tcp]
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            workers.append((subprocess.Popen(command, stdout=stdout, stderr=stderr), out, errors))

    with Service(folder / "model", shm, "--listen", tcp, "--keys", str(folder / "keys"), fresh=True) as service:
        process = psutil.Process(service.pid)
        began = looked = time.monotonic()
        try:
            for _ in range(2):
                start()
            while time.monotonic() < began + seconds:
                time.sleep(0.2)
                for entry in list(workers):
                    code = entry[0].poll()
                    if code is not None:
                        assert code == 9, entry[2].read_text()[-3000:]
                        deaths += 1
                        lives += entry[1].read_text()
                        workers.remove(entry)
                        start()
                if time.monotonic() >= looked + 60:
                    looked += 60
                    now = lives + "".join(out.read_text() for _, out, _ in workers)
                    status = make_transport(shm).look(shm).status
                    line = {
                        "minute": round((looked - began) / 60),
                        "compared": now.count("c"),
                        "vanished": now.count("v"),
                        "lost": now.count("l"),
                        "processes_died": deaths,
                        "rss_mib": process.memory_info().rss >> 20,
                        "uss_mib": process.memory_full_info().uss >> 20,
                        "descriptors": process.num_fds(),
                        "threads": process.num_threads(),
                        "clients": len(status["clients"]),
                        "held_mib": status["held_bytes"] >> 20,
                    }
                    print(json.dumps(line), flush=True)  # noqa: T201
        finally:
            for running, _, _ in workers:
                running.kill()
                running.wait()
        time.sleep(2)
        status = make_transport(shm).look(shm).status
        print(json.dumps({"clients": status["clients"], "outstanding": status["outstanding"],  # noqa: T201
                          "held_mib": status["held_bytes"] / (1 << 20), "descriptors": process.num_fds(),
                          "rss_mib": process.memory_info().rss >> 20}), flush=True)  # fmt: skip
        assert not status["clients"]
        assert not status["outstanding"]
        assert "c" in lives + "".join(out.read_text() for _, out, _ in workers), "no job was compared with plain PEFT"
        assert "Traceback" not in service.log


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main(float(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()))
