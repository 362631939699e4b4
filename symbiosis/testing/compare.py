"""Compare a client with plain ``transformers`` + PEFT: the same job, the same seeds, all resulting numbers.

A provider can check in this way whether a model or a PEFT method agrees before offering it::

    comparison = await compare(model, LoraConfig(task_type="CAUSAL_LM"))
    assert comparison.bit_equal, comparison
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from symbiosis.client.client import Client
from symbiosis.client.fibers import numpys_stream
from symbiosis.host import Executor

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class Job:
    """A job for a model: compute logits, generate twice, compute gradients, train.

    Args:
        vocabulary: upper bound of the token ids, exclusive.
        seed: seed of the token ids, and of the random stream when sampling and training start.
        sequences, length: shape of each batch of token ids.
        new_tokens: number of tokens to generate; 0 for no generation.
        steps: number of AdamW steps; 0 for no training.
        learning_rate: learning rate of AdamW.
        prepare: called with the adapted model first, for example to switch on gradient checkpointing or to unfreeze a
            norm.
        inputs: returns the model's arguments for a batch, given its number, with labels; in place of token ids.
        loss: returns the loss of a model's output, for models that return none.
    """

    vocabulary: int = 64
    seed: int = 1234
    sequences: int = 2
    length: int = 9
    new_tokens: int = 8
    steps: int = 20
    learning_rate: float = 1e-3
    prepare: Callable[[Any], object] | None = None
    inputs: Callable[[int], Mapping[str, torch.Tensor]] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None

    def loss_of(self, output: Any) -> Any:
        """Return the loss of a model's output."""
        return output.loss if self.loss is None else self.loss(output)

    def batch(self, number: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments for a batch. By default they are token ids, mask and labels, [sequences, length] each,
        where the second sequence is padded at its end."""
        if self.inputs is not None:
            return {name: tensor.to(device) for name, tensor in self.inputs(number).items()}
        generator = torch.Generator().manual_seed(self.seed + number)
        ids = torch.randint(3, self.vocabulary, (self.sequences, self.length), generator=generator).to(device)
        mask = torch.ones_like(ids)
        mask[1:2, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def prompt(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments for logits and generation: those of batch 0 without labels. By default the mask is all
        ones."""
        batch = self.batch(0, device)
        if self.inputs is not None:
            return {name: tensor for name, tensor in batch.items() if name != "labels"}
        return {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}

    @property
    def greedy(self) -> dict[str, Any]:
        return {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "do_sample": False}

    @property
    def sampled(self) -> dict[str, Any]:
        return {**self.greedy, "do_sample": True, "temperature": 0.8, "top_k": 20}


@dataclass
class Outcome:
    """The numbers that a job gave. Tensors are copies, on the CPU."""

    logits: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients after the first backward pass, by parameter name."""
    losses: list[float] = field(default_factory=list)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trainable parameters before the first step, by name."""
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trainable parameters after the last step, by name."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all numbers as tensors, by name."""
        alone = {"logits": self.logits, "greedy": self.greedy, "sampled": self.sampled}
        return {
            **{name: tensor for name, tensor in alone.items() if tensor is not None},
            **{f"gradient {name}": tensor for name, tensor in self.gradients.items()},
            **({"losses": torch.tensor(self.losses, dtype=torch.float64)} if self.losses else {}),
            **{f"adapter {name}": tensor for name, tensor in self.adapter.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """Differences between two outcomes."""

    differences: Mapping[str, float]
    """Largest relative difference of each tensor, max|a - b| / max|b|. Infinite if one tensor is missing, has another
    shape or dtype, or is not finite where the other one is. Places where both are NaN, or the same infinity or extreme
    of the dtype, with which models mask logits, are left out."""
    unequal: tuple[str, ...]
    """Names of the tensors that are not bit-equal."""
    trained: float
    """Relative difference of what training changed in the parameters, over all of them: norm of the difference divided
    by norm of the expected change. 0 without training, 1 for an outcome that changes nothing."""

    @classmethod
    def of(cls, outcome: Outcome, expected: Outcome) -> Comparison:
        """Return the differences of an outcome from the expected one."""
        a, b = outcome.tensors(), expected.tensors()
        names = sorted({*a, *b})
        return cls(
            {name: difference_of(a.get(name), b.get(name)) for name in names},
            tuple(name for name in names if name not in a or name not in b or not _equal(a[name], b[name])),
            _difference_of_changes(outcome, expected),
        )

    @property
    def bit_equal(self) -> bool:
        """Whether all tensors are bit-equal."""
        return not self.unequal

    def worst(self, prefix: str = "") -> float:
        """Return the largest difference of the tensors whose names start with ``prefix``; 0 if there are none."""
        return max((value for name, value in self.differences.items() if name.startswith(prefix)), default=0.0)

    def __str__(self) -> str:
        if self.bit_equal:
            return f"{len(self.differences)} tensors, all bit-equal"
        shown = sorted(self.unequal, key=self.differences.__getitem__, reverse=True)[:8]
        return (
            f"{len(self.unequal)} of {len(self.differences)} tensors differ; relative: "
            + ", ".join(f"{name} {self.differences[name]:.2g}" for name in shown)
            + (f"; what training changed differs by {self.trained:.2g}" if self.trained else "")
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are bit-equal. NaN in both is equal: some PEFT methods have a loss that is NaN."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def difference_of(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the largest relative difference of a tensor from the expected one; see :class:`Comparison`."""
    if a is None or b is None or a.shape != b.shape or a.dtype is not b.dtype:
        return float("inf")
    if _equal(a, b):
        return 0.0
    # Logits in fp32 may have the extremes of bf16, in which the model computes.
    most = min(torch.finfo(dtype).max for dtype in (a.dtype, torch.bfloat16)) if a.is_floating_point() else math.inf
    a, b = a.double(), b.double()
    masked = (a.isnan() & b.isnan()) | ((a == b) & (b.abs() >= most))
    a, b = a.masked_fill(masked, 0), b.masked_fill(masked, 0)
    difference = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
    return min(float("inf"), difference)  # NaN too


def _difference_of_changes(outcome: Outcome, expected: Outcome) -> float:
    """Return the relative difference of what training changed; see :class:`Comparison`."""
    a, b = outcome.adapter, expected.adapter
    if {name: (p.shape, p.dtype) for name, p in a.items()} != {name: (p.shape, p.dtype) for name, p in b.items()}:
        return float("inf")
    if not b:
        return 0.0
    changed, wanted = (
        torch.cat([(one.adapter[name].double() - one.initial[name].double()).flatten() for name in sorted(b)])
        for one in (outcome, expected)
    )
    masked = changed.isnan() & wanted.isnan()
    changed, wanted = changed.masked_fill(masked, 0), wanted.masked_fill(masked, 0)
    difference: float = ((changed - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
    return min(float("inf"), difference)  # NaN too


def run_job_plain(
    model: nn.Module, peft_config: PeftConfig | None, job: Job | None = None, *, seed: int = 0
) -> Outcome:
    """Run a job with plain ``transformers`` + PEFT, on a copy of the model. The caller's random state is kept."""
    from peft import get_peft_model

    job = job or Job()
    device = next(model.parameters()).device
    outcome = Outcome()
    with torch.random.fork_rng(), numpys_stream(job.seed):
        adapted: Any = copy.deepcopy(model).requires_grad_(False)
        torch.manual_seed(seed)
        if peft_config is not None:
            adapted = get_peft_model(adapted, copy.deepcopy(peft_config))
        adapted.eval()
        if job.prepare is not None:
            job.prepare(adapted)
        with torch.no_grad():
            outcome.logits = logits_of(adapted(**job.prompt(device)))
        if job.new_tokens:
            outcome.greedy = _copy(adapted.generate(**job.prompt(device), **job.greedy))
            torch.manual_seed(job.seed)
            outcome.sampled = _copy(adapted.generate(**job.prompt(device), **job.sampled))
        if job.steps and trainable(adapted):
            torch.manual_seed(job.seed)
            adapted.train()
            job.loss_of(adapted(**job.batch(0, device))).backward()
            outcome.gradients = _gradients(adapted)
            outcome.initial = _parameters(adapted)
            optimizer = torch.optim.AdamW(trainable(adapted).values(), lr=job.learning_rate)
            for number in range(job.steps):
                loss = job.loss_of(adapted(**job.batch(number, device)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                outcome.losses.append(loss.item())
            outcome.adapter = _parameters(adapted)
    return outcome


async def run_job(client: Client, job: Job | None = None) -> Outcome:
    """Run a job with a newly opened client, whose seed is the ``seed`` of the plain run."""
    job = job or Job()
    model = client.model
    if job.prepare is not None:
        await client.run(job.prepare, model)
    device = next(model.parameters()).device
    with numpys_stream(job.seed):
        return await _run_job(client, job, model, device)


async def _run_job(client: Client, job: Job, model: Any, device: torch.device) -> Outcome:
    outcome = Outcome()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return logits_of(model(**job.prompt(device)))

    outcome.logits = await client.run(logits)
    if job.new_tokens:
        outcome.greedy = _copy(await client.generate(**job.prompt(device), **job.greedy))
        client.manual_seed(job.seed)
        outcome.sampled = _copy(await client.generate(**job.prompt(device), **job.sampled))
    if job.steps and trainable(model):
        client.manual_seed(job.seed)
        model.train()
        await client.backward(job.loss_of(await client.forward(**job.batch(0, device))))
        outcome.gradients = _gradients(model)
        outcome.initial = _parameters(model)
        optimizer = torch.optim.AdamW(trainable(model).values(), lr=job.learning_rate)
        for number in range(job.steps):
            if job.loss is None:
                outcome.losses.append(await client.train_step(job.batch(number, device), optimizer))
                continue
            loss = job.loss(await client.forward(**job.batch(number, device)))
            await client.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
        outcome.adapter = _parameters(model)
    return outcome


async def compare(
    model: nn.Module, peft_config: PeftConfig | None = None, job: Job | None = None, *, seed: int = 0, **options: Any
) -> Comparison:
    """Compare one client alone on an executor with plain ``transformers`` + PEFT.

    Args:
        model: as for :class:`~symbiosis.Executor`; a copy is served.
        peft_config: as for :meth:`~symbiosis.Executor.client`.
        job: job to run; a :class:`Job` with its defaults if None.
        seed: seed of the adapter's initial values.
        **options: options of the executor.
    """
    expected = run_job_plain(model, peft_config, job, seed=seed)
    async with (
        Executor(copy.deepcopy(model), **options) as executor,
        executor.client(copy.deepcopy(peft_config), seed=seed) as client,
    ):
        return Comparison.of(await run_job(client, job), expected)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trainable parameters, by name."""
    return {name: _copy(parameter) for name, parameter in trainable(model).items()}


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients, and clear the gradients for the first optimizer step."""
    gradients = {name: _copy(p.grad) for name, p in trainable(model).items() if p.grad is not None}
    model.zero_grad()
    return gradients


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in a model's output; of several, the first; of a model without a head, its last states."""
    names = ("logits", "start_logits", "last_hidden_state")
    return _copy(next(getattr(output, name) for name in names if getattr(output, name, None) is not None))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
