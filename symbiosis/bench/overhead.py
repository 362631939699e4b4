"""What one client costs against plain transformers + PEFT: a decode step and a training step (Symbiosis, Table 2)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import Decoding, now, random_batch
from symbiosis.bench.models import PAPER_LORA, Preset, build, lora, plain_peft
from symbiosis.bench.report import Report, ratio
from symbiosis.core.client import Client

__all__ = ["overhead"]

GOALS = {"decode_ratio": "≤ 1.05 (paper: 1.25 to 1.70)", "train_ratio": "≤ 1.05 (paper: 1.25 to 1.70)"}


async def overhead(
    preset: Preset,
    *,
    device: torch.device,
    policy: str,
    base_layers: str,
    rounds: int,
    progress: Callable[[str], None],
) -> Report:
    """One client alone on its executor beside the same job as plain PEFT, turn about, for each LoRA of Table 2."""
    base = build(preset, device)
    report = Report("overhead", preset.name, GOALS)
    all_ratios: dict[str, list[float]] = {"decode": [], "train": []}
    async with symbiosis.Executor(base, policy=policy, base_layers=base_layers) as executor:
        for name, (rank, modules) in PAPER_LORA.items():
            progress(f"{name}: warm-up")
            plain = plain_peft(base, lora(rank, modules))
            async with executor.client(lora(rank, modules)) as client:
                times: dict[str, tuple[list[float], list[float]]] = {"decode": ([], []), "train": ([], [])}
                plain_decoding = Decoding(plain, preset, device)
                decoding = Decoding(client.model, preset, device)
                plain_optimizer = _optimizer(plain)
                optimizer = _optimizer(client.model)
                batch = random_batch(preset, device)
                work = {
                    "decode": (
                        partial(_decode_plain, plain_decoding, preset.decode_steps, device),
                        partial(_decode, client, decoding, preset.decode_steps, device),
                    ),
                    "train": (
                        partial(_train_plain, plain, plain_optimizer, batch, device),
                        partial(_train, client, optimizer, batch, device),
                    ),
                }
                for turn in range(-1, rounds):
                    if turn >= 0:
                        progress(f"{name}: round {turn + 1} of {rounds}")
                    plain.eval()
                    client.model.eval()
                    for job, (theirs, ours) in work.items():
                        pair = await _in_turn(turn, theirs, ours)
                        if turn >= 0:  # the first turn warms up
                            for measured, seconds in zip(times[job], pair, strict=True):
                                measured.append(seconds)
            del plain, plain_optimizer, plain_decoding, work
            row: dict[str, object] = {"adapter": name}
            for job, (all_theirs, all_ours) in times.items():
                scale = preset.decode_steps if job == "decode" else 1
                row[f"{job} plain ms"] = median(all_theirs) / scale * 1e3
                row[f"{job} symbiosis ms"] = median(all_ours) / scale * 1e3
                row[f"{job} ratio"] = ratio(all_ours, all_theirs)
                all_ratios[job] += [mine / other for mine, other in zip(all_ours, all_theirs, strict=True)]
            report.rows.append(row)
    for job, ratios in all_ratios.items():
        report.headline[f"{job}_ratio"] = median(ratios)
        report.headline[f"{job}_ratio_worst_adapter"] = max(float(row[f"{job} ratio"]) for row in report.rows)
    report.notes.append(
        f"Ratios are medians over {rounds} rounds of pairs measured next to each other, each first in "
        f"every other round; headlines are over all "
        f"adapters. Decode: 1 sequence, {preset.prompt}-token prompt; training: batch {preset.batch} × "
        f"{preset.sequence} tokens, AdamW; policy {policy}, base layers {base_layers!r}."
    )
    return report


async def _decode_plain(decoding: Decoding, steps: int, device: torch.device) -> float:
    decoding.prefill()
    start = now(device)
    decoding.steps(steps)
    return now(device) - start


async def _decode(client: Client, decoding: Decoding, steps: int, device: torch.device) -> float:
    await client.run(decoding.prefill)
    start = now(device)
    await client.run(decoding.steps, steps)
    return now(device) - start


async def _train_plain(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], device: torch.device
) -> float:
    model.train()
    start = now(device)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return now(device) - start


async def _train(
    client: Client, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], device: torch.device
) -> float:
    start = now(device)
    await client.train_step(batch, optimizer)
    return now(device) - start


async def _in_turn(
    turn: int, plain: Callable[[], Awaitable[float]], ours: Callable[[], Awaitable[float]]
) -> tuple[float, float]:
    """Seconds of both; who goes first changes with each turn, because the first one does not find the same caches."""
    if turn % 2:
        mine = await ours()
        return await plain(), mine
    return await plain(), await ours()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
