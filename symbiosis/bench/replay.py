"""Replay of a trace on a real executor; :mod:`symbiosis.simulation.replay` does so in simulation."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch

from symbiosis import Client, Executor
from symbiosis.bench.jobs import Decoding, Tuning, end
from symbiosis.bench.models import PAPER_LORA, Preset, lora
from symbiosis.errors import UsageError
from symbiosis.simulation.clients import Done
from symbiosis.simulation.outcome import SLO, LoadOutcome, outcome
from symbiosis.simulation.replay import ReplayedLoad
from symbiosis.simulation.trace import Arrival


class Crowd:
    """Open clients with adapters of their own that can play a load repeatedly."""

    def __init__(self, executor: Executor, preset: Preset, load: ReplayedLoad) -> None:
        self._executor = executor
        self._preset = preset
        self._device = executor.device
        self._load = load
        self._texts: list[Client] = []
        self._jobs: list[tuple[Client, Tuning]] = []

    async def __aenter__(self) -> Crowd:
        adapters = cycle(PAPER_LORA.values())
        for number in range(len(self._load.by_client())):
            client = self._executor.client(lora(*next(adapters)), name=f"text-{number}")
            self._texts.append(await client.open())
        for number in range(self._load.tuning):
            client = await self._executor.client(lora(), name=f"job-{number}").open()
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(1, self._preset.vocabulary, (1, self._load.rows), generator=generator).to(self._device)
            job = Tuning(self._executor, client, {"input_ids": ids, "labels": ids})
            await job.warm_up()
            self._jobs.append((client, job))
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in [*self._texts, *(client for client, _ in self._jobs)]:
            await client.close()

    async def play(self, slo: SLO, progress: Callable[[float], None] = lambda part: None) -> LoadOutcome:
        """Play the load once, with earlier objects frozen for the garbage collector, as under ``symbiosis serve``."""
        texts: list[tuple[Done, Arrival]] = []
        self._executor.reset_statistics()

        def now() -> float:
            return time.perf_counter() - began

        async def asks(client: Client, arrivals: Iterator[Arrival], seed: int) -> None:
            for arrival in arrivals:
                done = Done(arrival.at if arrival.pause is None else now() + arrival.pause)
                texts.append((done, arrival))
                if self._load.paced:
                    await asyncio.sleep(done.began - now())
                else:
                    done.began = now()
                job = Decoding(client.model, self._preset, self._device, seed, length=arrival.prompt)
                await client.run(_text, job, arrival.tokens, done, now)
                progress(sum(len(done.tokens) >= text.tokens for done, text in texts) / len(self._load.trace))

        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        tuning = [asyncio.create_task(job.run()) for _, job in self._jobs]
        try:
            await asyncio.gather(
                *(
                    asks(client, work, seed)
                    for seed, (client, work) in enumerate(zip(self._texts, self._load.by_client(), strict=True))
                )
            )
            seconds = now()
            jobs = [Done(tuned=job.tokens()) for _, job in self._jobs]
        finally:
            gc.unfreeze()
            await end(tuning)
        return outcome(texts, jobs, seconds, self._executor.statistics().mean_batch, slo)


def check_answers(texts: Sequence[Arrival], lengths: float) -> None:
    """Raise :class:`UsageError` unless an answer of a trace has two tokens, after its lengths were multiplied."""
    if all(text.tokens == 1 for text in texts):
        raise UsageError(
            f"the first {len(texts)} answers of the trace have one token each with lengths times {lengths:g}, as this "
            "preset has them; the time from one token to the next needs answers of two"
        )


def _text(job: Decoding, tokens: int, done: Done, now: Callable[[], float]) -> None:
    job.prefill()
    done.tokens.append(now())
    for _ in range(tokens - 1):
        job.steps(1)
        done.tokens.append(now())
