"""Cost of masks: decoding and training over ``tcp://``, with bare rows and under each scheme (Symbiosis, 3.8)."""

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
from symbiosis.privacy import LocalPads, NoisePool, SecretShares
from symbiosis.privacy.audit.costs import relative_error

GOALS = {"overhead_noise_pool": "≤ 1.10, precomputed"}
_BARE = "none"
_HEADLINE_NAMES = {"secret-shares": "shares", "secret-shares, own weights": "wrapped_shares"}

Times = dict[str, dict[str, list[float]]]
"""Job → scheme → seconds of each round."""


async def privacy(settings: Settings) -> Report:
    """Measure one client with a LoRA on q, k, v and o under each scheme, interleaved with bare rows.

    The executor has a process of its own. What a scheme can compute ahead is computed before each measurement. The two
    executors of secret shares share this machine's cores.
    """
    preset, rounds = settings.preset, settings.rounds
    report = Report("privacy", preset.name, GOALS)
    policy = settings.policy
    async with AsyncExitStack() as stack:
        settings.progress("starting two executors")
        services = [stack.enter_context(served(preset.name, "tcp", policy, settings.base_layers)) for _ in range(2)]
        addresses = [service.address for service in services]
        settings.progress("opening clients")
        remote = await stack.enter_async_context(symbiosis.connect(addresses[0]))
        tenants: dict[str, Tenant] = {}
        for name, scheme in _schemes(settings, addresses).items():
            client = await stack.enter_async_context(remote.client(lora(), seed=0, privacy=scheme or "none"))
            tenants[name] = Tenant(client, preset, settings.device)
        bare = await _logits(tenants[_BARE])
        errors = {name: relative_error(await _logits(tenant), bare) for name, tenant in tenants.items()}
        times = await _measure(settings, tenants)
    for name in tenants:
        _report_scheme(report, settings, name, times, errors[name])
    report.notes.append(
        f"Medians over {rounds} rounds. Ratios are of measurements of one round; overhead_… is the median over the "
        "ratios of decoding and training, as many of either. Decode: 1 sequence, "
        f"{preset.prompt}-token prompt; training: batch {preset.batch} × {preset.sequence} tokens, AdamW; LoRA r8 "
        f"qkvo; policy {policy}, base layers {settings.base_layers!r}. "
        "Logit error: the largest difference from logits of bare rows, relative to the largest of those. "
        "Times do not include what is computed ahead: for pads, as much as the base layers' own work, on the tenant's "
        "side. Both executors of secret shares run on this machine's cores."
    )
    return report


async def _measure(settings: Settings, tenants: dict[str, Tenant]) -> Times:
    times: Times = {job: {name: [] for name in tenants} for job in ("decode", "train")}
    for turn in range(-1, settings.rounds):
        settings.says(turn, "decoding and training")
        order = list(tenants) if turn % 2 else list(reversed(tenants))
        for job, seconds in times.items():
            for name in order:
                tenant = tenants[name]
                await tenant.client.precompute()
                took = await tenant.decode() if job == "decode" else await tenant.train()
                if turn >= 0:  # the first turn warms up
                    seconds[name].append(took)
    return times


def _report_scheme(report: Report, settings: Settings, name: str, times: Times, error: float) -> None:
    row: dict[str, object] = {"scheme": name}
    for job, seconds in times.items():
        scale = settings.preset.decode_steps if job == "decode" else 1
        row[f"{job} ms"] = median(seconds[name]) / scale * 1e3
        row[f"{job} over bare"] = ratio(seconds[name], seconds[_BARE])
    row["logit error"] = error
    report.rows.append(row)
    if name == _BARE:
        return
    key = _HEADLINE_NAMES.get(name, name).replace("-", "_")
    ratios = {
        job: [a / b for a, b in zip(seconds[name], seconds[_BARE], strict=True)] for job, seconds in times.items()
    }
    report.headline[f"overhead_{key}"] = median(ratios["decode"] + ratios["train"])
    report.headline[f"overhead_{key}_decode"] = median(ratios["decode"])
    report.headline[f"overhead_{key}_training"] = median(ratios["train"])
    report.headline[f"logit_error_{key}"] = error


def _schemes(settings: Settings, addresses: list[str]) -> dict[str, Privacy | None]:
    """Return schemes by name. Pads suffice for two measurements: more are made when half of them are used."""
    preset = settings.preset
    rows = 2 * (max(preset.batch * preset.sequence, preset.decode_steps) + preset.prompt)
    own = settings.base()
    return {
        _BARE: None,
        "noise-pool": NoisePool(),
        "local-pads": LocalPads(own, rows=rows),
        "secret-shares": SecretShares(addresses[1]),
        "secret-shares, own weights": SecretShares(addresses[1], model=own),
    }


async def _logits(tenant: Tenant) -> torch.Tensor:
    """Return logits [batch, sequence, vocabulary] of the training batch, before any training."""
    with torch.no_grad():
        logits: torch.Tensor = (await tenant.client.forward(input_ids=tenant.batch["input_ids"])).logits
    return logits.float()
