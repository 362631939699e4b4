"""What one client costs against plain transformers + PEFT: a decode step and a training step (Symbiosis, Table 2)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import Decoding, now, random_batch
from symbiosis.bench.models import PAPER_LORA, Preset, build, lora, plain_peft
from symbiosis.bench.report import Report, ratio

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
                for turn in range(-1, rounds):
                    if turn >= 0:
                        progress(f"{name}: round {turn + 1} of {rounds}")
                    plain.eval()
                    plain_decoding.prefill()
                    start = now(device)
                    plain_decoding.steps(preset.decode_steps)
                    plain_decode = now(device) - start
                    client.model.eval()
                    await client.run(decoding.prefill)
                    start = now(device)
                    await client.run(decoding.steps, preset.decode_steps)
                    decode = now(device) - start
                    plain.train()
                    start = now(device)
                    plain(**batch).loss.backward()
                    plain_optimizer.step()
                    plain_optimizer.zero_grad()
                    plain_train = now(device) - start
                    start = now(device)
                    await client.train_step(batch, optimizer)
                    train = now(device) - start
                    if turn >= 0:  # the first turn warms up
                        for job, pair in (("decode", (plain_decode, decode)), ("train", (plain_train, train))):
                            times[job][0].append(pair[0])
                            times[job][1].append(pair[1])
            del plain, plain_optimizer, plain_decoding
            row: dict[str, object] = {"adapter": name}
            for job, (theirs, ours) in times.items():
                scale = preset.decode_steps if job == "decode" else 1
                row[f"{job} plain ms"] = median(theirs) / scale * 1e3
                row[f"{job} symbiosis ms"] = median(ours) / scale * 1e3
                row[f"{job} ratio"] = ratio(ours, theirs)
                all_ratios[job] += [mine / other for mine, other in zip(ours, theirs, strict=True)]
            report.rows.append(row)
    for job, ratios in all_ratios.items():
        report.headline[f"{job}_ratio"] = median(ratios)
        report.headline[f"{job}_ratio_worst_adapter"] = max(float(row[f"{job} ratio"]) for row in report.rows)
    report.notes.append(
        f"Ratios are medians over {rounds} rounds of pairs measured next to each other; headlines are over all "
        f"adapters. Decode: 1 sequence, {preset.prompt}-token prompt; training: batch {preset.batch} × "
        f"{preset.sequence} tokens, AdamW; policy {policy}, base layers {base_layers!r}."
    )
    return report


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
