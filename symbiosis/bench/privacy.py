"""What masks cost: decoding and training over ``tcp://``, bare and under each privacy scheme (Symbiosis, 3.8)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import Decoding, adamw, now, random_batch
from symbiosis.bench.models import Preset, lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import served
from symbiosis.bench.settings import Settings
from symbiosis.core.client import Client
from symbiosis.core.protocols import Privacy
from symbiosis.privacy import LocalPads, MixedNoise, NoisePool, SecretShares

__all__ = ["privacy"]

GOALS = {"overhead_noise_pool": "≤ 1.10, precomputed"}
_BARE = "none"


async def privacy(settings: Settings) -> Report:
    """One client with a LoRA on q, k, v and o, of an executor in a process of its own; each scheme and none turn about.

    Everything that a scheme can compute ahead is computed before a measurement begins, and what pads were used is made
    up for between measurements. The two executors of secret shares are on this machine, so they share its cores.
    """
    preset, device, rounds = settings.preset, settings.device, settings.rounds
    report = Report("privacy", preset.name, GOALS)
    policy = settings.policy or "opportunistic"
    async with AsyncExitStack() as stack:
        settings.progress("starting two executors")
        addresses = [stack.enter_context(served(preset.name, "tcp", policy, settings.base_layers)) for _ in range(2)]
        settings.progress("opening clients")
        remote = await stack.enter_async_context(symbiosis.connect(addresses[0]))
        tenants: dict[str, _Tenant] = {}
        for name, scheme in _schemes(settings, addresses).items():
            client = await stack.enter_async_context(remote.client(lora(), seed=0, privacy=scheme or "none"))
            tenants[name] = _Tenant(client, preset, device)
        bare = await tenants[_BARE].logits()
        errors = {name: _error(await tenant.logits(), bare) for name, tenant in tenants.items()}
        times: dict[str, dict[str, list[float]]] = {job: {name: [] for name in tenants} for job in ("decode", "train")}
        for turn in range(-1, rounds):
            settings.says(turn, "decoding and training")
            order = list(tenants) if turn % 2 else list(reversed(tenants))
            for job, seconds in times.items():
                for name in order:
                    await tenants[name].make_ready()
                    took = await tenants[name].decode() if job == "decode" else await tenants[name].train()
                    if turn >= 0:  # the first turn warms up
                        seconds[name].append(took)
    for name in tenants:
        row: dict[str, object] = {"scheme": name}
        for job, seconds in times.items():
            scale = preset.decode_steps if job == "decode" else 1
            row[f"{job} ms"] = median(seconds[name]) / scale * 1e3
            row[f"{job} over bare"] = ratio(seconds[name], seconds[_BARE])
        row["logit error"] = errors[name]
        report.rows.append(row)
        if name != _BARE:
            key = {"secret-shares": "shares", "secret-shares, own weights": "wrapped_shares"}.get(name, name)
            key = key.replace("-", "_")
            both = [a / b for job in times.values() for a, b in zip(job[name], job[_BARE], strict=True)]
            report.headline[f"overhead_{key}"] = median(both)
            report.headline[f"logit_error_{key}"] = errors[name]
    report.notes.append(
        f"Medians over {rounds} rounds; ratios are of measurements of one round, and headlines are medians over "
        f"decoding and training. Decode: 1 sequence, {preset.prompt}-token prompt; training: batch {preset.batch} × "
        f"{preset.sequence} tokens, AdamW; LoRA r8 qkvo; policy {policy}, base layers {settings.base_layers!r}. Logit "
        "error: the largest difference from bare logits over the largest bare one. What is computed ahead is not in "
        "these times: for pads, as much as the base layers' own work, on the tenant's side. Both executors of secret "
        "shares run on this machine's cores."
    )
    return report


def _schemes(settings: Settings, addresses: list[str]) -> dict[str, Privacy | None]:
    """By name. Pads are enough for a measurement, twice over: they are made in the background when half are used."""
    preset = settings.preset
    rows = 2 * (max(preset.batch * preset.sequence, preset.decode_steps) + preset.prompt)
    own = settings.base()
    return {
        _BARE: None,
        "noise-pool": NoisePool(),
        "mixed-noise": MixedNoise(),
        "local-pads": LocalPads(own, rows=rows),
        "secret-shares": SecretShares(addresses),
        "secret-shares, own weights": SecretShares(addresses, model=own),
    }


class _Tenant:
    """A client and its work."""

    def __init__(self, client: Client, preset: Preset, device: torch.device) -> None:
        self._client = client
        self._device = device
        self._steps = preset.decode_steps
        self._decoding = Decoding(client.model, preset, device)
        self._optimizer = adamw(client.model)
        self._batch = random_batch(preset, device)

    async def make_ready(self) -> None:
        await self._client.precompute()

    async def logits(self) -> torch.Tensor:
        """Of the training batch, [batch, sequence, vocabulary], before any training."""
        with torch.no_grad():
            logits: torch.Tensor = (await self._client.forward(input_ids=self._batch["input_ids"])).logits
        return logits.float()

    async def decode(self) -> float:
        """Seconds for the preset's decode steps."""
        self._client.model.eval()
        await self._client.run(self._decoding.prefill)
        start = now(self._device)
        await self._client.run(self._decoding.steps, self._steps)
        return now(self._device) - start

    async def train(self) -> float:
        """Seconds for a training step."""
        start = now(self._device)
        await self._client.train_step(self._batch, self._optimizer)
        return now(self._device) - start


def _error(logits: torch.Tensor, bare: torch.Tensor) -> float:
    return ((logits - bare).abs().max() / bare.abs().max()).item()
