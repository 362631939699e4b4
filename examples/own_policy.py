"""A batching policy of one's own: decode before everything else.

A policy is any object with a name, ``submitted`` and ``decide``. It is pure: no clock, no I/O, no tensors. Whatever it
decides, the scheduler checks; a wrong decision is reported and replaced, so a policy cannot lose a tenant's rows.

To make it available by name (``Executor(model, policy="decode-first:patience_ms=10")``, ``symbiosis demo --policy
decode-first``, ``symbiosis policies``), a package installs it under this entry point::

    [project.entry-points."symbiosis.policies"]
    decode-first = "my_package:DecodeFirst"

Run it: ``python examples/own_policy.py``
"""

from __future__ import annotations

import asyncio

import torch
from peft import LoraConfig

import symbiosis
from symbiosis.core.protocols import Decision, QueueView, Run, View, Wait
from symbiosis.core.requests import Kind, Pass, Request
from symbiosis.testing import tiny_model


class DecodeFirst:
    """Tenants who wait for their next token go before those who fine-tune, as long as nobody waits too long.

    Args:
        patience_ms: a request that has waited this long goes first, whatever it is, so that nobody starves.
    """

    name = "decode-first"
    lone_at_once = True  # a request that is all there is needs no decision

    def __init__(self, patience_ms: float = 10.0) -> None:
        self.patience_ms = patience_ms

    def submitted(self, request: Request) -> None:
        """Nothing to do: this policy keeps no index of its own."""

    def decide(self, view: View, now: float) -> Decision:
        oldest = view.oldest
        due = oldest.arrived + self.patience_ms / 1e3
        if due <= now:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        if view.thinking:
            return Wait(due)  # somebody may still join
        queue = min(view.queues.values(), key=_urgency)
        return Run(queue.key, queue.take(view.max_rows), f"{Kind(_urgency(queue)[0]).name.lower()} first")


def _urgency(queue: QueueView) -> tuple[int, int]:
    """The most urgent kind first; then the layer furthest behind, so that those who drifted apart meet again."""
    layers, pass_ = queue.key
    behind = -layers[-1] if pass_ is Pass.BACKWARD else layers[0]
    return min(request.kind for request in queue), behind


async def fine_tune(executor: symbiosis.Executor, name: str) -> None:
    async with executor.client(LoraConfig(task_type="CAUSAL_LM"), name=name, seed=0) as client:
        optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad], lr=1e-3)
        ids = torch.arange(3, 51).reshape(2, 24)
        for _ in range(5):
            await client.train_step({"input_ids": ids, "labels": ids}, optimizer)


async def chat(executor: symbiosis.Executor, name: str) -> None:
    async with executor.client(name=name) as client:
        await client.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False)


async def main() -> None:
    async with symbiosis.Executor(tiny_model(), policy=DecodeFirst(patience_ms=10)) as executor:
        jobs = [fine_tune(executor, "trainer-1"), fine_tune(executor, "trainer-2")]
        jobs += [chat(executor, f"chat-{number}") for number in (1, 2, 3)]
        await asyncio.gather(*jobs)
        statistics = executor.statistics()
    print(f"{statistics.requests} requests in {statistics.batches} batches, {statistics.mean_batch:.2f} requests each")
    for reason, count in sorted(statistics.reasons.items()):
        print(f"  {reason}: {count} batches")
    for name, client in sorted(statistics.clients.items()):
        wait = client.wait_s / client.requests * 1e3
        print(f"  {name}: {client.requests} requests, mean batch {client.mean_batch:.2f}, mean wait {wait:.2f} ms")


if __name__ == "__main__":
    asyncio.run(main())
