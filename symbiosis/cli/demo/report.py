"""What came of the demo: did every tenant get what plain transformers + PEFT would have given it, and at what cost?"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis._version import __version__
from symbiosis.cli.demo.jobs import Footprint, Generation, Plan, Tenant, Training
from symbiosis.cli.demo.serve import Served
from symbiosis.errors import BrokenError
from symbiosis.terminal.console import write_json


class DisagreementError(BrokenError):
    """A tenant's result is not that of plain transformers + PEFT."""


@dataclass
class Agreement:
    """Two loss curves, step by step."""

    differences: list[float]
    """Relative to the plain loss."""
    worst: int
    """The step with the largest difference, counted from 0."""
    tolerance: float

    @property
    def largest(self) -> float:
        return self.differences[self.worst]

    @property
    def agrees(self) -> bool:
        return self.largest <= self.tolerance  # False for NaN


def agreement(ours: list[float], plain: list[float], tolerance: float) -> Agreement:
    """Compare two loss curves of the same length. A step where either is not a number differs infinitely."""
    differences = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, plain, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    return Agreement(differences, max(range(len(differences)), key=differences.__getitem__), tolerance)


class Report:
    """The results of a plan, once everything in it has run."""

    def __init__(self, plan: Plan, served: Served, tie: float = 1e-3) -> None:
        self.plan = plan
        self.served = served
        self._tie = max(tie, plan.tolerance)
        self.agreements = [agreement(job.losses, job.plain_losses, plan.tolerance) for job in plan.trainings]
        self.shared = _sum([Footprint(base=served.base_bytes), *(_of(tenant.memory) for tenant in plan.tenants)])
        self.separate = _sum([_of(tenant.plain_memory) for tenant in plan.tenants])

    # --------------------------------------------------------------------------------------------------- is it right?

    def problems(self) -> list[str]:
        """What differs from plain transformers + PEFT by more than rounding: tenant, place and both values."""
        found = []
        for job, compared in zip(self.plan.trainings, self.agreements, strict=True):
            if not compared.agrees:
                step = next(
                    index for index, value in enumerate(compared.differences) if not value <= compared.tolerance
                )
                found.append(
                    f"{job.name} ({job.method}): the loss at step {step + 1} is {job.losses[step]:.6f} with symbiosis "
                    f"and {job.plain_losses[step]:.6f} with plain transformers + PEFT, a relative difference of "
                    f"{compared.differences[step]:.1e} (tolerance {compared.tolerance:g})"
                )
        for generation in self.plan.generations:
            for number, gap in generation.plain_gaps.items():
                if not abs(gap) <= self._tie:
                    found.append(
                        f"{generation.name} ({generation.method}): the text after {generation.prompts[number]!r} is "
                        f"{self._texts(generation, number)} with symbiosis and "
                        f"{self.plan.decode(generation.plain_outputs[number])!r} with plain transformers + PEFT"
                    )
        return found

    def check(self) -> None:
        """Raise DisagreementError unless everything agrees."""
        problems = self.problems()
        if problems:
            raise DisagreementError("not what plain transformers + PEFT gives:\n  " + "\n  ".join(problems))

    def _texts(self, job: Generation, number: int) -> str:
        return " or ".join(repr(self.plan.decode(tokens)) for tokens in job.outputs[number])

    def _texts_verdict(self, job: Generation) -> str:
        ties = sum(abs(gap) <= self._tie for gap in job.plain_gaps.values())
        wrong = len(job.plain_gaps) - ties
        if wrong:
            return f"[red]{wrong} of {len(job.outputs)} texts differ[/]"
        if ties:
            return f"[yellow]the same, but for {ties} of {len(job.outputs)} where two tokens tie[/]"
        return f"[green]the same, all {len(job.outputs)} texts[/]"

    # ------------------------------------------------------------------------------------------------------ to look at

    def print(self, console: Console) -> None:
        """Tables and samples."""
        self._print_samples(console)
        console.print(self._training_table())
        console.print(self._numerics(), style="dim")
        console.print(self._generation_table())
        console.print(self._speed_table())
        console.print(self._memory_table())
        console.print(self._counted(), style="dim")

    def _numerics(self) -> str:
        if all(compared.largest == 0.0 for compared in self.agreements):
            return (
                "Equal to the last bit on this machine. Elsewhere a matrix product of several tenants' rows may add in "
                "another order than one of a single tenant's; hence the tolerance.\n"
            )
        return (
            "Not equal to the last bit: a matrix product of several tenants' rows may add in another order than one of "
            "a single tenant's.\n"
        )

    def _counted(self) -> str:
        base = _of(self.plan.trainings[0].plain_memory)
        return (
            "Counted: bytes of distinct storages after the last step; for gradients, those of the trainable "
            "parameters; for activations, what autograd keeps of one batch from forward to backward, or the largest KV "
            f"cache. The base is {base.base / base.total:.0%} of {self.plan.trainings[0].name}'s plain job; the larger "
            "this share, the more there is to save.\n"
        )

    def _training_table(self) -> Table:
        table = _table("fine-tuning, against plain transformers + PEFT with the same seed and data order")
        _columns(table, "tenant", "PEFT", "learns from")
        _columns(table, "steps", "loss", "largest difference", right=True)
        _columns(table, "verdict")
        for job, compared in zip(self.plan.trainings, self.agreements, strict=True):
            first, last = _ends(job.losses)
            verdict = f"[green]agrees[/] (≤ {compared.tolerance:g})" if compared.agrees else "[red]differs[/]"
            where = f"{compared.largest:.1e} at step {compared.worst + 1}" if compared.largest else "none"
            names = map(escape, (job.name, job.method, job.text))
            table.add_row(*names, str(len(job.losses)), f"{first:.2f} → {last:.2f}", where, verdict)
        return table

    def _generation_table(self) -> Table:
        table = _table("generating, against plain transformers + PEFT")
        _columns(table, "tenant", "PEFT")
        _columns(table, "texts", "tokens", right=True)
        _columns(table, "greedy output")
        for job in self.plan.generations:
            verdict = self._texts_verdict(job)
            table.add_row(escape(job.name), escape(job.method), str(job.rounds), str(job.tokens), verdict)
        return table

    def _speed_table(self) -> Table:
        statistics = self.served.statistics
        table = _table(f"speed on one executor ({escape(self.plan.policy)})")
        _columns(table, "tenant", "job")
        _columns(table, "tokens", "seconds", "tokens/s", "mean batch", "mean wait", right=True)
        for tenant in self.plan.tenants:
            client = statistics.clients[tenant.name]
            table.add_row(
                escape(tenant.name),
                "fine-tunes" if isinstance(tenant, Training) else "generates",
                f"{tenant.tokens}",
                f"{tenant.seconds:.1f}",
                f"{tenant.rate:.0f}",
                f"{client.mean_batch:.2f}",
                f"{client.wait_s / client.requests * 1e3:.1f} ms",
            )
        table.add_section()
        table.add_row(
            "all four", "at once", f"{self.tokens}", f"{self.served.seconds:.1f}",
            f"{self.tokens / self.served.seconds:.0f}", f"{statistics.mean_batch:.2f}",
            f"{statistics.wait_s / statistics.requests * 1e3:.1f} ms", style="bold",
        )  # fmt: skip
        table.add_row(
            "plain jobs", "in turn", f"{self.tokens}", f"{self.plain_seconds:.1f}",
            f"{self.tokens / self.plain_seconds:.0f}", "1.00", "–", style="dim",
        )  # fmt: skip
        table.caption = "plain jobs: training as measured, generating as many tokens at the measured speed"
        table.caption_justify = "left"
        return table

    def _memory_table(self) -> Table:
        table = _table("memory in MB")
        _columns(table, "")
        parts = ("base", "adapter", "gradients", "AdamW", "activations", "total")
        _columns(table, *parts, right=True)
        for tenant in self.plan.tenants:
            table.add_row(escape(tenant.name), *_megabytes(_of(tenant.memory)))
        table.add_section()
        table.add_row("one base for all four", *_megabytes(self.shared), style="bold")
        table.add_row("one base a job", *_megabytes(self.separate), style="bold")
        saved = self.separate.total / self.shared.total
        table.caption = f"one base a job takes {saved:.2f} times the memory"
        table.caption_justify = "left"
        return table

    def _print_samples(self, console: Console) -> None:
        table = _table("samples", show_lines=True)
        table.add_column("tenant", style="bold", no_wrap=True)
        table.add_column("prompt, and the text that follows it [dim](before fine-tuning)[/]", overflow="fold", ratio=1)
        table.add_column("after fine-tuning", overflow="fold", ratio=1)
        for job in self.plan.trainings:
            for prompt, before, after in zip(job.prompts, job.before, job.after, strict=True):
                table.add_row(f"{job.name}\n{job.method}", _sample(prompt, before), _sample(prompt, after))
        for generation in self.plan.generations:
            prompt, text = generation.prompts[0], self.plan.decode(generation.outputs[0][0])
            table.add_row(f"{generation.name}\n{generation.method}", _sample(prompt, text), "[dim]generates only[/]")
        console.print(table)

    # -------------------------------------------------------------------------------------------------- to read by code

    @property
    def tokens(self) -> int:
        """Trained on and generated by all tenants."""
        return sum(tenant.tokens for tenant in self.plan.tenants)

    @property
    def plain_seconds(self) -> float:
        """For the same tokens, one plain job after another: training as measured, generating at the measured speed."""
        training = sum(job.plain_seconds for job in self.plan.trainings)
        return training + sum(job.tokens * job.plain_seconds / job.plain_tokens for job in self.plan.generations)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        statistics = self.served.statistics
        return {
            "name": "demo",
            "symbiosis": __version__,
            "machine": _machine(),
            "model": self.plan.model,
            "device": str(self.plan.device),
            "dtype": str(self.plan.dtype).removeprefix("torch."),
            "policy": self.plan.policy,
            "notes": self.plan.notes,
            "agrees": not self.problems(),
            "problems": self.problems(),
            "tolerance": self.plan.tolerance,
            "seconds": self.served.seconds,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.served.seconds,
            "plain_seconds": self.plain_seconds,
            "executor": {
                "requests": statistics.requests,
                "batches": statistics.batches,
                "rows": statistics.rows,
                "mean_batch": statistics.mean_batch,
                "mean_rows": statistics.mean_rows,
                "run_s": statistics.run_s,
                "wait_s": statistics.wait_s,
                "reasons": dict(statistics.reasons),
            },
            "memory": {"one_base": _bytes(self.shared), "one_base_a_job": _bytes(self.separate)},
            "tenants": [self._tenant(tenant) for tenant in self.plan.tenants],
        }

    def _tenant(self, tenant: Tenant) -> dict[str, Any]:
        client = self.served.statistics.clients[tenant.name]
        common = {
            "name": tenant.name,
            "job": "fine-tune" if isinstance(tenant, Training) else "generate",
            "method": tenant.method,
            "seed": tenant.seed,
            "tokens": tenant.tokens,
            "seconds": tenant.seconds,
            "tokens_per_s": tenant.rate,
            "requests": client.requests,
            "rows": client.rows,
            "mean_batch": client.mean_batch,
            "wait_s": client.wait_s,
            "memory": _bytes(_of(tenant.memory)),
            "plain_memory": _bytes(_of(tenant.plain_memory)),
        }
        if isinstance(tenant, Training):
            return common | self._training(tenant)
        assert isinstance(tenant, Generation)
        return common | self._generation(tenant)

    def _training(self, job: Training) -> dict[str, Any]:
        compared = self.agreements[self.plan.trainings.index(job)]
        return {
            "text": job.text,
            "learning_rate": job.learning_rate,
            "losses": job.losses,
            "plain_losses": job.plain_losses,
            "plain_seconds": job.plain_seconds,
            "largest_relative_difference": compared.largest,
            "agrees": compared.agrees,
            "samples": [
                {"prompt": prompt, "before": before, "after": after}
                for prompt, before, after in zip(job.prompts, job.before, job.after, strict=True)
            ],
        }

    def _generation(self, job: Generation) -> dict[str, Any]:
        return {
            "texts": job.rounds,
            "plain_tokens_per_s": job.plain_tokens / job.plain_seconds,
            "agrees": all(abs(gap) <= self._tie for gap in job.plain_gaps.values()),
            "samples": [
                {
                    "prompt": job.prompts[number],
                    "texts": [self.plan.decode(tokens) for tokens in texts],
                    "plain_text": self.plan.decode(job.plain_outputs[number]),
                }
                for number, texts in sorted(job.outputs.items())
            ],
        }

    def save_json(self, path: Path) -> None:
        """Write :meth:`as_dict`; numbers that JSON does not have become null."""
        write_json(path, self.as_dict())


# --------------------------------------------------------------------------------------------------------------- parts


def _table(title: str, **options: Any) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, **options)


def _columns(table: Table, *headings: str, right: bool = False) -> None:
    for heading in headings:
        table.add_column(heading, justify="right" if right else "left")


def _sample(prompt: str, text: str) -> str:
    """Prompt and continuation, told apart by colour, and by a mark where there is none."""
    continued = "\n".join(line for line in text.split("\n") if line.strip())
    return f"[dim]{escape(prompt.rstrip())}▸[/][cyan]{escape(continued)}[/]"


def _ends(losses: list[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth."""
    count = max(1, len(losses) // 10)
    return sum(losses[:count]) / count, sum(losses[-count:]) / count


def _of(footprint: Footprint | None) -> Footprint:
    assert footprint is not None, "the report comes after the jobs"
    return footprint


def _sum(footprints: list[Footprint]) -> Footprint:
    names = [part.name for part in fields(Footprint)]
    return Footprint(**{name: sum(getattr(footprint, name) for footprint in footprints) for name in names})


def _bytes(footprint: Footprint) -> dict[str, int]:
    return asdict(footprint) | {"total": footprint.total}


def _megabytes(footprint: Footprint) -> list[str]:
    return [f"{size / 1e6:.2f}" if size else "–" for size in _bytes(footprint).values()]


def _machine() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
