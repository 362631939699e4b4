"""Transformers' own tensor parallelism, for comparison with shards: ``tp_plan="auto"`` in two processes, with gloo.

``python -m symbiosis.bench.tensor_parallel PRESET FOLDER RANK`` is one of the processes. FOLDER has the model of the
preset, and the process answers each line of its standard input, ``prefill``, ``steps`` or ``train``, by the seconds
that it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

from symbiosis.bench.service import answer

COUNT = 2
"""Processes that hold the model together."""


class TensorParallel:
    """A plain PEFT job in two processes, each with a part of the base model."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        """The number of each process."""
        return [process.pid for process in self._processes]

    async def prefill(self) -> None:
        """Run the prompt from an empty cache."""
        await self._run("prefill")

    async def steps(self) -> float:
        """Return the seconds of the preset's decode steps, after the prompt."""
        return await self._run("steps")

    async def train(self) -> float:
        """Return the seconds of a training step."""
        return await self._run("train")

    async def _run(self, work: str) -> float:
        return max(await asyncio.gather(*(answer(process, work) for process in self._processes)))


@contextlib.asynccontextmanager
async def tensor_parallel(preset: str) -> AsyncIterator[TensorParallel]:
    """Yield a job on a preset's model once its processes have loaded it.

    The job has a LoRA on the query and value projections: PEFT's LoRA on the output projection fails under ``tp_plan``.
    """
    import torch
    from transformers.utils import logging

    from symbiosis.bench.models import PRESETS, build

    logging.disable_progress_bar()
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        build(PRESETS[preset], torch.device("cpu")).save_pretrained(folder)
        command = [sys.executable, "-W", "ignore", "-m", __name__, preset, folder]
        processes: list[asyncio.subprocess.Process] = []
        try:
            for rank in map(str, range(COUNT)):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(COUNT)}
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *command, rank, stdin=pipe, stdout=pipe, env={**os.environ, **place}
                    )
                )
            job = TensorParallel(processes)
            await job.prefill()
            await job.steps()
            yield job
        finally:
            for process in processes:  # one whose peer has ended would wait for it
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes))


def _main(preset: str, folder: str, rank: str) -> None:
    import torch
    from peft import get_peft_model
    from torch import distributed
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from symbiosis.bench.jobs import PlainJob
    from symbiosis.bench.models import PRESETS, lora

    logging.disable_progress_bar()
    torch.set_num_threads(max(torch.get_num_threads() // COUNT, 1))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=COUNT)
    size = PRESETS[preset]
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=size.dtype, tp_plan="auto")
    torch.manual_seed(0)
    job = PlainJob(get_peft_model(base, lora(modules=["q_proj", "v_proj"])), size, torch.device("cpu"))
    work = {"prefill": job.prefill, "steps": job.steps, "train": job.train}
    for line in sys.stdin:
        sys.stdout.write(f"{asyncio.run(work[line.strip()]()) or 0.0}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
