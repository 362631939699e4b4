"""A property of joint decoding: whatever several tenants do at once, each gets what it would get by itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from transformers import LogitsProcessor, LogitsProcessorList

from symbiosis import Client, Executor
from symbiosis.testing import tiny_model
from tests.client.joint.common import texts
from tests.helpers import LOGITS, examples, ia3, lora, prefix

KINDS = [lora(r=2, lora_dropout=0.0), lora(r=4, lora_dropout=0.0), None, ia3(), prefix()]
BASE = tiny_model("llama", max_position_embeddings=256)
BASE.requires_grad_(False)
BASE.generation_config.eos_token_id = None

Act = tuple[str, int, int]
"""What a tenant does, and two numbers that say how."""
acts = st.tuples(
    st.sampled_from(["write", "write", "go on", "sample", "train", "stop", "fail", "beam", "texts", "pause", "hook"]),
    st.integers(1, 7),
    st.integers(1, 7),
)
programs = st.lists(
    st.tuples(st.integers(0, len(KINDS) - 1), st.lists(acts, min_size=1, max_size=5)), min_size=2, max_size=6
)


class _StopError(Exception):
    """Ends a text in the middle."""


class _StopAt(LogitsProcessor):
    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise _StopError
        return scores


def plain(config: Any) -> Any:
    """Return plain PEFT's model, for the current seed of torch."""
    model = copy.deepcopy(BASE)
    return model if config is None else get_peft_model(model, copy.deepcopy(config))


def text(length: int) -> torch.Tensor:
    return torch.arange(3, 3 + length)[None]


def program(model: Any, acts: list[Act]) -> Generator[tuple[str, Any], Any, list[torch.Tensor]]:
    """Do what a tenant does, on its client's model or on plain PEFT's. Yields what differs between the two: texts to
    generate, steps to train, pauses. Returns the logits of all texts."""
    found: list[torch.Tensor] = []
    last: Any = None
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.02) if trainable else None
    prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    """Whether PEFT raises RuntimeError when a text goes on from a cache, in plain models too."""
    for act, one, two in acts:
        options: dict[str, Any] = {
            "input_ids": text(one + 1),
            "max_new_tokens": 2 * two,
            "output_logits": True,
            "return_dict_in_generate": True,
            "pad_token_id": 0,
            "do_sample": act == "sample",
            "num_beams": 2 if act == "beam" else 1,
        }
        if act == "texts":
            options |= texts(one + 3, two, 2)
        if act == "pause":
            yield "pause", one / 1000
        elif act == "train":
            if optimizer is not None:
                yield "train", (optimizer, {"input_ids": text(one + 2), "labels": text(one + 2)})
        elif act == "stop":
            yield "stop", (options, one)
        elif act == "go on" and last is not None and not prompt_learning:
            options |= {"input_ids": last.sequences, "past_key_values": last.past_key_values}
            last = yield "write", options
            found += last.logits
        else:
            if act == "fail":
                options["logits_processor"] = LogitsProcessorList([_StopAt(one)])
            hook = _norm(model).register_forward_hook(lambda module, args, out: out * 1.5) if act == "hook" else None
            last = yield "write", options
            if hook is not None:
                hook.remove()
            if last is not None:
                found += last.logits
            if act in ("beam", "texts", "hook"):
                last = None
    return found


def _norm(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("model.norm"))


def plainly(model: Any, acts: list[Act]) -> list[torch.Tensor]:
    """Run a program on plain PEFT."""
    steps, result = program(model, acts), None
    while True:
        try:
            what, given = steps.send(result)
        except StopIteration as end:
            return end.value
        result = None
        if what == "write":
            with contextlib.suppress(_StopError):
                result = model.eval().generate(**given)
        elif what == "train":
            optimizer, batch = given
            model.train()(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


async def as_tenant(client: Client, acts: list[Act]) -> list[torch.Tensor]:
    """Run a program as a tenant, and leave."""
    steps, result = program(client.model, acts), None
    while True:
        try:
            what, given = steps.send(result)
        except StopIteration as end:
            await client.close()
            return end.value
        result = None
        if what == "write":
            with contextlib.suppress(_StopError):
                result = await client.generate(**given)
        elif what == "train":
            optimizer, batch = given
            await client.train_step(batch, optimizer)
        elif what == "pause":
            await asyncio.sleep(given)
        else:
            options, ticks = given
            text = asyncio.ensure_future(client.generate(**options))
            await asyncio.sleep(ticks / 1000)
            text.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await text


async def _meet(executor: Executor) -> None:
    """Have the joint model made."""
    async with executor.client() as one, executor.client() as other:
        while not executor.statistics().clients or not any(c.joint for c in executor.statistics().clients.values()):
            await asyncio.gather(*(c.generate(input_ids=text(2), max_new_tokens=3) for c in (one, other)))


@pytest.mark.hypothesis
@settings(max_examples=examples(60))
@given(
    programs, st.sampled_from(["exact", "fast"]), st.sampled_from(["opportunistic", "lockstep", "co-serving", "fair"])
)
def test_whatever_tenants_do_at_once_each_gets_what_it_would_get_by_itself(
    programs: list[tuple[int, list[Act]]], mode: str, policy: str
) -> None:
    async def run() -> list[list[torch.Tensor]]:
        async with Executor(copy.deepcopy(BASE), joint=mode, policy=policy) as executor:
            await _meet(executor)
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(executor.client(KINDS[kind], seed=seed))
                    for seed, (kind, _) in enumerate(programs)
                ]
                work = zip(clients, programs, strict=True)
                return await asyncio.gather(*(as_tenant(client, acts) for client, (_, acts) in work))

    got = asyncio.run(run())
    for seed, ((kind, acts), logits) in enumerate(zip(programs, got, strict=True)):
        torch.manual_seed(seed)
        expected = plainly(plain(KINDS[kind]), acts)
        assert len(logits) == len(expected)
        for one, right in zip(logits, expected, strict=True):
            assert (one - right).abs().max() <= 10 * LOGITS * right.abs().max()  # after training steps
