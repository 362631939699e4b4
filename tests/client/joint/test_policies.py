"""Policies, statistics and traces see each tenant of a joint walk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from symbiosis import Client, Executor
from symbiosis.core.terms import JOINT
from symbiosis.policies import Fair, NoLockstep, RateLimit
from tests.client.joint.common import forever, generate, model_of, ready, some_clients
from tests.helpers import lora, until


async def test_statistics_and_a_trace_show_each_tenant(tmp_path: Path) -> None:
    async with some_clients(3) as (executor, clients):
        with executor.trace(tmp_path / "trace.json"):
            await asyncio.gather(*map(generate, clients))
        statistics = executor.statistics()
        assert sorted(statistics.clients) == executor.service.clients == [client.name for client in clients]
        rows = {count.rows for count in statistics.clients.values()}
        assert len(rows) == 1, "equal texts have equal rows"
        assert statistics.rows == sum(count.rows for count in statistics.clients.values())
        assert statistics.mean_batch > 2
    events = json.loads((tmp_path / "trace.json").read_text())[:-1]
    lines = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    ran = Counter(event["tid"] for event in events if event.get("cat") == "running")
    assert len({ran[lines[client.name]] for client in clients}) == 1
    assert ran[lines[JOINT]] == 0


async def test_fair_charges_each_tenant_of_a_joint_walk() -> None:
    policy = Fair(quantum=16)
    async with some_clients(4, policy=policy) as (executor, clients):
        before, own = [policy.served(client.name) for client in clients], policy.served(JOINT)
        outs = await asyncio.gather(*(generate(client, tokens=8 * (n + 1)) for n, client in enumerate(clients)))
        assert executor.statistics().clients[clients[3].name].joint >= 20
        charged = [policy.served(client.name) - start for client, start in zip(clients, before, strict=True)]
        assert policy.served(JOINT) == own
    assert charged == sorted(charged)
    assert charged[0] > 0.5 * (6 + 2 * 7)  # lone requests are free
    assert all(out.sequences.shape[1] == 6 + 8 * (n + 1) for n, out in enumerate(outs))


async def test_fair_does_not_stop_a_joint_walk_of_tenants_that_were_served_unequally() -> None:
    policy = Fair(quantum=2)
    async with Executor(model_of("llama"), policy=policy) as executor, contextlib.AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(executor.client(lora(), name=f"flood/{n}")) for n in range(3)]
        polite = [await stack.enter_async_context(executor.client(lora(), name="polite"))]
        await ready(executor, [flood[0], *polite])
        others = [asyncio.ensure_future(forever(client)) for client in flood]
        started = time.monotonic()
        await generate(*polite, tokens=40)
        assert time.monotonic() - started < 20
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        counts = executor.statistics().clients
    assert counts["polite"].joint > 0
    assert any("the policy holds it back" in counts[client.name].alone for client in flood)


async def test_a_tenant_above_its_rate_does_not_hold_up_the_others() -> None:
    policy = RateLimit(tokens_per_s=1e6, tenants={"slow": 1.0}, burst_s=1.0)
    async with some_clients(2, policy=policy) as (executor, clients), executor.client(lora(), name="slow") as slow:

        def counts(client: Client) -> tuple[int, Counter[str]]:
            found = executor.statistics().clients.get(client.name)
            return (0, Counter()) if found is None else (found.joint, Counter(found.alone))

        tasks = [asyncio.ensure_future(forever(client)) for client in (*clients, slow)]
        await until(lambda: counts(slow)[1]["the policy holds it back"] > 0, 60)
        joint = [counts(client)[0] for client in clients]
        await until(lambda: all(counts(client)[0] > now + 48 for client, now in zip(clients, joint, strict=True)), 60)
        assert sum(counts(slow)[1].values()) + counts(slow)[0] < 48  # the others are not in step with it
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_lone_tenant_above_its_rate_does_not_hold_up_one_that_begins() -> None:
    policy = RateLimit(tokens_per_s=1e6, tenants={"slow": 0.01}, burst_s=400.0)
    async with Executor(model_of("llama"), policy=policy) as executor, contextlib.AsyncExitStack() as stack:
        slow, other = [await stack.enter_async_context(executor.client(name=name)) for name in ("slow", "other")]

        def alone(client: Client, why: str) -> int:
            found = executor.statistics().clients.get(client.name)
            return 0 if found is None else found.alone.get(why, 0)

        tasks = [asyncio.ensure_future(generate(slow, length=3))]  # the second token is held back
        await until(lambda: alone(slow, "no other client decodes") == 2, 10)
        tasks.append(asyncio.ensure_future(forever(other)))
        await until(lambda: alone(other, "no other client was ready") > 2, 5)
        assert alone(slow, "no other client decodes") == 2
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_joint_request_has_the_most_urgent_terms_of_its_tenants() -> None:
    class Watch(NoLockstep):
        seen: ClassVar[list[Any]] = []

        def submitted(self, request: Any) -> None:
            if request.joint:
                self.seen.append((request.joint, request.terms))

    base = model_of("llama")
    async with Executor(base, policy=Watch()) as executor, contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        clients = [
            await enter(executor.client(name="low", priority=-2, slo_ms=900)),
            await enter(executor.client(name="high", priority=3, ttft_ms=700)),
            await enter(executor.client(name="soon", slo_ms=400)),
        ]
        await ready(executor, clients)
        await asyncio.gather(*map(generate, clients))
    terms = next(terms for names, terms in Watch.seen if set(names) == {"low", "high", "soon"})
    assert terms == (3, 400, 700, None)
