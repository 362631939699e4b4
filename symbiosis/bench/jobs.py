"""The work that is measured. The same functions run on a plain PEFT model and in a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbiosis import Client, Executor
from symbiosis.bench.models import Preset


def now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel clients that work without end. Raises the error of one that has failed before."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)


def random_batch(preset: Preset, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a training batch of random tokens: input_ids and labels [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, preset.vocabulary, (preset.batch, preset.sequence), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


class Decoding:
    """Greedy decoding of ``rows`` random prompts of ``length`` tokens (the preset's by default), one token a step, with
    a KV cache. Synchronous model code."""

    def __init__(
        self,
        model: Any,
        preset: Preset,
        device: torch.device,
        seed: int = 0,
        rows: int = 1,
        length: int | None = None,
        **options: Any,
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = rows, length or preset.prompt
        self._prompt = torch.randint(1, preset.vocabulary, shape, generator=generator).to(device)
        self.model = model
        self._options = options
        self._cache: Any = None
        self._token = self._prompt

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        ids: list[list[int]] = self._prompt.tolist()
        return ids

    def prefill(self) -> None:
        """Run the prompt from an empty cache."""
        self._cache, self._token = None, self._prompt
        self.steps(1)

    @torch.no_grad()
    def steps(self, count: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Decode ``count`` tokens per row, and call a function after each."""
        for _ in range(count):
            output = self.model(
                input_ids=self._token, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **self._options
            )
            self._cache = output.past_key_values
            self._token = output.logits[:, -1:].argmax(-1)
            after_each()


class Tuning:
    """A client that repeatedly fine-tunes on one batch, and a count of its tokens.

    Tokens are counted by answered requests for single layers, so an unfinished step counts in part.
    """

    def __init__(self, executor: Executor, client: Client, batch: dict[str, torch.Tensor]) -> None:
        self._executor = executor
        self._client = client
        self._batch = batch
        self._optimizer = adamw(client.model)
        self._rows_a_token = 0.0

    async def warm_up(self) -> None:
        """Run two steps: siblings are found in the first, and the requests of a step are counted in the second.

        Resets the executor's statistics.
        """
        await self._client.train_step(self._batch, self._optimizer)
        self._executor.reset_statistics()
        await self._client.train_step(self._batch, self._optimizer)
        self._rows_a_token = self._rows() / self._batch["input_ids"].numel()
        self._executor.reset_statistics()

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            await self._client.train_step(self._batch, self._optimizer)

    def tokens(self) -> float:
        """Return the tokens since the executor's statistics were last reset."""
        return self._rows() / self._rows_a_token

    def _rows(self) -> int:
        seen = self._executor.statistics().clients.get(self._client.name)
        return seen.rows if seen else 0


class PlainJob:
    """Synchronous code that decodes and trains, for timing: on plain PEFT, or on a base that another process serves."""

    def __init__(self, model: torch.nn.Module, preset: Preset, device: torch.device, seed: int = 0) -> None:
        self.model = model
        self.batch = random_batch(preset, device, seed)
        self.optimizer = adamw(model)
        self._device = device
        self._steps = preset.decode_steps
        self._decoding = Decoding(model, preset, device, seed)

    async def prefill(self) -> None:
        """Run the prompt from an empty cache."""
        self.model.eval()
        self._decoding.prefill()

    async def steps(self) -> float:
        """Return the seconds of the preset's decode steps, after the prompt."""
        start = now(self._device)
        self._decoding.steps(self._steps)
        return now(self._device) - start

    async def decode(self) -> float:
        """Return the seconds of the preset's decode steps, after a prompt."""
        await self.prefill()
        return await self.steps()

    async def train(self) -> float:
        """Return the seconds of a training step."""
        self.model.train()
        start = now(self._device)
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return now(self._device) - start


class Tenant:
    """A client that decodes and trains, for timing."""

    def __init__(
        self, client: Client, preset: Preset, device: torch.device, seed: int = 0, length: int | None = None
    ) -> None:
        self.client = client
        self.batch = random_batch(preset, device, seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._device = device
        self._steps = preset.decode_steps
        self._decoding = Decoding(client.model, preset, device, seed, length=length)

    async def prefill(self) -> None:
        """Run the prompt from an empty cache."""
        self.client.model.eval()
        await self.client.run(self._decoding.prefill)

    async def steps(self, count: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Decode ``count`` tokens, and call a function after each."""
        await self.client.run(self._decoding.steps, count, after_each)

    async def decode(self) -> float:
        """Return the seconds of the preset's decode steps, after a prompt."""
        await self.prefill()
        start = now(self._device)
        await self.steps(self._steps)
        return now(self._device) - start

    async def train(self) -> float:
        """Return the seconds of a training step."""
        start = now(self._device)
        if self._optimizer is None:
            self._optimizer = adamw(self.client.model)
        await self.client.train_step(self.batch, self._optimizer)
        return now(self._device) - start
