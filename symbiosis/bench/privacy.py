"""What masks cost: decoding and training over ``tcp://``, bare and under each privacy scheme (Symbiosis, 3.8)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import Tenant
from symbiosis.bench.models import lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import served
from symbiosis.bench.settings import Settings
from symbiosis.core.privacy import Privacy
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
        tenants: dict[str, Tenant] = {}
        for name, scheme in _schemes(settings, addresses).items():
            client = await stack.enter_async_context(remote.client(lora(), seed=0, privacy=scheme or "none"))
            tenants[name] = Tenant(client, preset, device)
        bare = await _logits(tenants[_BARE])
        errors = {name: _error(await _logits(tenant), bare) for name, tenant in tenants.items()}
        times: dict[str, dict[str, list[float]]] = {job: {name: [] for name in tenants} for job in ("decode", "train")}
        for turn in range(-1, rounds):
            settings.says(turn, "decoding and training")
            order = list(tenants) if turn % 2 else list(reversed(tenants))
            for job, seconds in times.items():
                for name in order:
                    await tenants[name].client.precompute()
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
            ratios = {
                job: [a / b for a, b in zip(seconds[name], seconds[_BARE], strict=True)]
                for job, seconds in times.items()
            }
            report.headline[f"overhead_{key}"] = median(ratios["decode"] + ratios["train"])
            report.headline[f"overhead_{key}_decode"] = median(ratios["decode"])
            report.headline[f"overhead_{key}_training"] = median(ratios["train"])
            report.headline[f"logit_error_{key}"] = errors[name]
    report.notes.append(
        f"Medians over {rounds} rounds; ratios are of measurements of one round, and overhead_… is the median over "
        "those of decoding and of training together, as many of either. Decode: 1 sequence, "
        f"{preset.prompt}-token prompt; training: batch {preset.batch} × {preset.sequence} tokens, AdamW; LoRA r8 "
        f"qkvo; policy {policy}, base layers {settings.base_layers!r}. "
        "Logit error: the largest difference from bare logits over the largest bare one. "
        "What is computed ahead is not in these times: for pads, as much as the base layers' own work, on the tenant's "
        "side. Both executors of secret shares run on this machine's cores."
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


async def _logits(tenant: Tenant) -> torch.Tensor:
    """Of the training batch, [batch, sequence, vocabulary], before any training."""
    with torch.no_grad():
        logits: torch.Tensor = (await tenant.client.forward(input_ids=tenant.batch["input_ids"])).logits
    return logits.float()


def _error(logits: torch.Tensor, bare: torch.Tensor) -> float:
    return ((logits - bare).abs().max() / bare.abs().max()).item()
