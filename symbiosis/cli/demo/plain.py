"""The demo's jobs with plain transformers and PEFT, one after another, each with a base model of its own.

Nothing of symbiosis runs here: this is what the tenants would have done without it, and what they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from symbiosis.cli.demo.jobs import Footprint, Generation, Plan, Tenant, Training
from symbiosis.cli.demo.memory import cache_bytes, optimizer_tensors, saved_bytes, storages, total


def _model(plan: Plan, tenant: Tenant) -> tuple[Any, dict[int, int]]:
    """The adapted model, and the storages of its base."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=plan.dtype).to(plan.device)
    model.requires_grad_(False)
    base = storages([*model.parameters(), *model.buffers()])
    torch.manual_seed(tenant.seed)
    if tenant.adapter is not None:
        model = PeftModel.from_pretrained(model, str(tenant.adapter))
    elif tenant.config is not None:
        model = get_peft_model(model, tenant.config())
    return model, base


def train(plan: Plan, job: Training, step_done: Callable[[float], None]) -> None:
    """Train a tenant's adapter. Fills in ``plain_losses``, ``plain_seconds`` and ``plain_memory``."""
    model, base = _model(plan, job)
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.learning_rate)
    started = time.monotonic()
    for batch in job.batches:
        inputs = {name: tensor.to(plan.device) for name, tensor in batch.items()}
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.plain_losses.append(loss.item())
        step_done(job.plain_losses[-1])
    job.plain_seconds = time.monotonic() - started
    tensors = [*model.parameters(), *model.buffers()]
    job.plain_memory = Footprint(
        base=sum(base.values()),
        adapter=total(tensors, base),
        gradients=total(trainable),
        optimizer=total(optimizer_tensors(optimizer)),
        activations=saved_bytes(lambda: model(**inputs).loss, tensors),
    )


def generate(plan: Plan, job: Generation, text_done: Callable[[], None]) -> None:
    """Continue a tenant's prompts. Fills in ``plain_outputs``, ``plain_gaps``, ``plain_memory`` and the speed."""
    model, base = _model(plan, job)
    model.eval()
    cache = 0
    for number in sorted(job.outputs):
        ids = plan.encode(job.prompts[number])
        started = time.monotonic()
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_scores=True,
            **plan.generation_options(),
        )
        job.plain_seconds += time.monotonic() - started
        tokens = job.plain_outputs[number] = result.sequences[0, ids.shape[1] :].tolist()
        job.plain_tokens += len(tokens)
        gaps = [_gap(result.scores, tokens, others) for others in job.outputs[number]]
        if any(gap is not None for gap in gaps):
            job.plain_gaps[number] = max(gap for gap in gaps if gap is not None)
        cache = max(cache, cache_bytes(result.past_key_values))
        text_done()
    job.plain_memory = Footprint(
        base=sum(base.values()), adapter=total([*model.parameters(), *model.buffers()], base), activations=cache
    )


def _gap(scores: tuple[torch.Tensor, ...], tokens: list[int], others: list[int]) -> float | None:
    """How far apart the scores of two texts' first different tokens are (not negative: the first text is greedy).

    None where the texts are the same.
    """
    for step, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return float(scores[step][0, token] - scores[step][0, other])
    return None if len(tokens) == len(others) else float("inf")
