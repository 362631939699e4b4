"""A tenant's process for the chaos test. It repeats its job until it is told to stop, and checks each result.

``python -m tests.chaos_job ADDRESS METHOD CHECKPOINT [KEY]`` prints a line ``done N`` for each job that succeeded. On
an error it exits with status 1 and prints the reason to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.errors import ConnectionLostError
from symbiosis.testing import Job, Outcome, run_job, run_job_plain
from tests.helpers import METHODS, assert_close

JOB = Job(steps=30, new_tokens=12)


def stop() -> bool:
    """Return whether standard input has a line or has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main(address: str, method: str, checkpoint: str, key: str | None = None) -> None:
    torch.set_num_threads(1)
    config: Any = METHODS[method.removesuffix("-async")]("llama")
    expected = run_job_plain(AutoModelForCausalLM.from_pretrained(checkpoint), config, JOB)

    def report(outcome: Outcome, count: int) -> None:
        assert_close(outcome, expected)
        sys.stdout.write(f"done {count}\n")
        sys.stdout.flush()

    async def coroutine() -> None:
        async with contextlib.AsyncExitStack() as stack:
            base = await stack.enter_async_context(symbiosis.connect(address, retry=90.0, key=key))
            count = 0
            while count == 0 or not stop():
                count += 1
                client = await entered(lambda: base.client(METHODS[method.removesuffix("-async")]("llama"), seed=0))
                try:
                    report(await run_job(client, JOB), count)
                finally:
                    await client.close()

    async def entered(make: Any) -> Any:
        """Open a client, and try again while no executor listens at the address."""
        while True:
            try:
                return await make().open()
            except ConnectionLostError:
                await asyncio.sleep(0.2)

    wait_for(address, key)
    if method.endswith("-async"):
        asyncio.run(coroutine())
        return
    with symbiosis.open_model(address, retry=90.0, key=key) as model:
        count = 0
        while count == 0 or not stop():
            count += 1
            report(run_job_plain(model, config, JOB), count)


def wait_for(address: str, key: str | None) -> None:
    """Wait until an executor answers. ``retry`` covers an executor that was lost, not one that has not started yet."""
    end = time.monotonic() + 60
    while True:
        try:
            make_transport(address, key=key).look(address)
        except ConnectionLostError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
