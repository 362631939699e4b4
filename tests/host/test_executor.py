"""Tests of the executor: statistics, valid and invalid policies, loading, event loops, work between requests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import time
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig

import symbiosis
from symbiosis.client.fibers import current_fiber
from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Batch, Request
from symbiosis.errors import (
    CannotWaitError,
    ClientClosedError,
    ExecutorClosedError,
    LayerError,
    UnknownNameError,
    UsageError,
)
from symbiosis.executor.pace import Pace
from symbiosis.executor.runner import DeviceClock
from symbiosis.modes import in_modes, modes_aside
from symbiosis.policies import Lockstep, NoLockstep
from symbiosis.testing import run_job, run_job_plain, tiny_model
from tests.helpers import BATCH, IDS, adamw, assert_close, crowd, ia3, in_thread, lora, until
from tests.moe import mixture


class Moody(Policy):
    """A policy of which every other call raises or returns an invalid decision."""

    name = "moody"

    def __init__(self, mood: str) -> None:
        self.mood = mood
        self.count = 0

    def submitted(self, request: Request) -> None:
        if self.mood == "raises when submitted":
            raise RuntimeError("not now")

    def decide(self, view: View, now: float) -> Decision:
        self.count += 1
        if self.count % 2:
            if self.mood == "raises":
                raise RuntimeError("not today")
            if self.mood == "nonsense":
                return "later"  # type: ignore[return-value]
            if self.mood == "waits" and not view.thinking:
                return Wait(None)
            if self.mood == "takes too much":
                return Run(view.oldest.key, [(view.oldest, 10**6)], "all")
        return Run(view.oldest.key, view.queues[view.oldest.key].take(view.max_rows), "fine")


@pytest.mark.parametrize("mood", ["raises", "raises when submitted", "nonsense", "waits", "takes too much"])
async def test_a_bad_policy_is_named_and_every_request_is_served(
    base: Any, mood: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_job_plain(base, lora(), seed=3)
    with caplog.at_level(logging.ERROR, logger="symbiosis"):
        async with symbiosis.Executor(base, policy=Moody(mood)) as executor, crowd(executor, [(ia3(), "train")]):
            async with executor.client(lora(), seed=3) as client:
                assert_close(await run_job(client), expected)
    messages = [record.getMessage() for record in caplog.records]
    assert messages
    assert all("policy 'moody'" in message for message in messages), messages
    assert len(messages) < 30  # few messages are logged
    if mood == "raises":
        assert "not today" in caplog.text
        assert caplog.records[0].exc_info
    executor.engine.scheduler.validate()


async def test_statistics(base: Any) -> None:
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        empty = executor.statistics()
        assert (empty.requests, empty.batches, empty.rows, empty.mean_batch, empty.mean_rows) == (0, 0, 0, 0.0, 0.0)
        async with executor.client(name="a") as a, executor.client(name="b") as b:
            await asyncio.gather(a.forward(input_ids=IDS), b.forward(input_ids=IDS[:1]))
        statistics = executor.statistics()
        head = statistics.layers["lm_head forward"]
        assert head.requests == 2
        assert head.rows == 27
        assert head.members >= head.batches
        assert statistics.requests == sum(layer.requests for layer in statistics.layers.values())
        assert statistics.requests == sum(client.requests for client in statistics.clients.values())
        assert statistics.rows == sum(client.rows for client in statistics.clients.values())
        assert set(statistics.clients) == {"a", "b"}
        assert statistics.clients["a"].rows == 2 * statistics.clients["b"].rows
        assert 1 < statistics.mean_batch <= 2
        assert statistics.run_s > 0
        assert statistics.wait_s >= 0
        assert sum(statistics.reasons.values()) == statistics.batches
        executor.reset_statistics()
        assert executor.statistics() == empty


async def test_a_reset_covers_what_the_policy_counts(base: Any) -> None:
    async with symbiosis.Executor(base, policy="fair+co-serving:slo_ms=10000") as executor:
        async with executor.client(name="alice") as client:
            tokens: Any = {"input_ids": IDS[:1], "min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}
            await client.generate(**tokens)
            before = executor.statistics().tenants
            assert set(before) == {"alice"}
            assert before["alice"].slo_kept == 7
            executor.reset_statistics()
            assert executor.statistics().tenants == {}
            await client.generate(**tokens)
            after = executor.statistics().tenants
        assert set(after) == {"alice"}
        assert after["alice"].slo_kept == 7
        assert after["alice"].service == pytest.approx(before["alice"].service)


async def test_lockstep_puts_all_clients_in_every_batch(base: Any) -> None:
    """Four equal clients that start together walk together."""
    async with symbiosis.Executor(base, policy=Lockstep()) as executor:
        clients = [await executor.client().open() for _ in range(4)]
        await asyncio.gather(*[client.forward(input_ids=IDS) for client in clients])
        assert executor.statistics().mean_batch == 4
        for client in clients:
            await client.close()


async def test_no_lockstep_puts_one_client_in_every_batch(base: Any) -> None:
    async with symbiosis.Executor(base, policy=NoLockstep()) as executor:
        clients = [await executor.client().open() for _ in range(4)]
        await asyncio.gather(*[client.forward(input_ids=IDS) for client in clients])
        assert executor.statistics().mean_batch == 1
        for client in clients:
            await client.close()


async def test_opportunistic_brings_desynchronized_clients_together(base: Any) -> None:
    """Clients start at different layers and synchronize: most batches then have all of them."""
    async with symbiosis.Executor(base, policy="opportunistic") as executor:

        async def job(delay: int) -> None:
            async with executor.client() as client:

                def late() -> None:
                    fiber = current_fiber()
                    assert fiber is not None
                    for _ in range(delay):  # the client is thinking meanwhile, so no other client is alone
                        fiber.wait(asyncio.sleep(0))
                    client.model.generate(input_ids=IDS[:, :4], max_new_tokens=12, min_new_tokens=12)

                await client.run(late)

        await asyncio.gather(*[job(3 * number) for number in range(4)])
        assert executor.statistics().mean_batch > 2


@pytest.mark.parametrize("name", ["from the folder", "the class", "bf16"])
async def test_from_pretrained(base: Any, tmp_path: Any, name: str) -> None:
    base.save_pretrained(str(tmp_path))
    options: dict[str, Any] = {
        "from the folder": {},
        "the class": {"model_class": type(base), "attn_implementation": "eager"},
        "bf16": {"dtype": torch.bfloat16},
    }[name]
    async with symbiosis.Executor.from_pretrained(
        tmp_path, policy="lockstep", max_rows=64, name="loaded", base_layers="mlp", **options
    ) as executor:
        assert "inproc://loaded" in repr(executor)
        assert "lockstep" in repr(executor)
        async with executor.client() as client:
            logits = (await client.forward(input_ids=IDS)).logits
            assert type(client.model).__name__ == "LlamaForCausalLM"
    # Not base.to(bf16), which also rounds the frequencies of the rotary embedding.
    plain = type(base).from_pretrained(tmp_path, dtype=torch.bfloat16) if name == "bf16" else base
    expected = plain(input_ids=IDS).logits
    assert logits.dtype is expected.dtype
    torch.testing.assert_close(logits, expected, rtol=0 if name == "bf16" else 1e-5, atol=1e-5)


async def test_from_pretrained_without_a_model(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} has no config.json"):
        symbiosis.Executor.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="there is no folder /no/such/folder"):
        symbiosis.Executor.from_pretrained("/no/such/folder")


async def test_from_pretrained_runs_no_code_of_the_model(base: Any, tmp_path: Path) -> None:
    """transformers would ask on standard input whether to run it."""
    base.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    own = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match=r"has Python code of its own, which is not run; if you trust it"):
        symbiosis.Executor.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"policy": "magic"}, UnknownNameError, "magic"),
        ({"policy": "opportunistic:wait_ms=-1"}, UsageError, "wait_ms is -1"),
        ({"max_rows": 0}, UsageError, "max_rows is 0"),
        ({"max_bytes": 1 << 60}, UsageError, "max_bytes is too large; give"),
        (
            {"max_bytes": 1 << 20},
            UsageError,
            "max_bytes is 1048576; give a whole number, 100663296 to",
        ),
        ({"base_layers": "nothing-like-it"}, UsageError, "nothing-like-it"),
    ],
    ids=str,
)
def test_bad_options(base: Any, options: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        symbiosis.Executor(base, **options)


def test_representation(base: Any) -> None:
    assert "not open" in repr(symbiosis.Executor(base))
    assert "15 base layers" in repr(symbiosis.Executor(copy.deepcopy(base)))


@pytest.mark.parametrize("loop", ["asyncio", "asyncio-eager", "uvloop"])
def test_event_loops(base: Any, loop: str) -> None:
    """A tenant trains and generates on each of the common event loops."""
    expected = run_job_plain(base, lora(), seed=1)

    async def main() -> None:
        if loop == "asyncio-eager":
            if not hasattr(asyncio, "eager_task_factory"):
                pytest.skip("eager tasks came with Python 3.12")
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with symbiosis.Executor(base) as executor, crowd(executor, [(ia3(), "train"), (None, "generate")]):
            async with executor.client(lora(), seed=1) as client:
                assert_close(await run_job(client), expected)

    if loop == "uvloop":
        uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())


async def test_closing_goes_on_if_a_task_that_waits_for_it_is_cancelled(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen("tcp://127.0.0.1:0")
        waits = asyncio.create_task(executor.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        assert waits.cancelled()
        await asyncio.wait_for(executor.wait_closed(), 10)


async def test_a_close_that_has_failed_can_be_repeated(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = symbiosis.Executor(base)
    await executor.start()
    with monkeypatch.context() as patch:
        patch.setattr(executor.service, "close", Mock(side_effect=PermissionError))
        with pytest.raises(PermissionError):
            await executor.close()
    await executor.close()
    await asyncio.wait_for(executor.wait_closed(), 10)


async def test_two_executors_in_one_process() -> None:
    """Two executors with different models run on one loop, and each serves its own clients."""
    one, two = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    plain = [model(input_ids=IDS).logits for model in (one, two)]
    async with symbiosis.Executor(one) as first, symbiosis.Executor(two) as second:
        async with first.client(name="same") as a, second.client(name="same") as b:
            got = await asyncio.gather(a.forward(input_ids=IDS), b.forward(input_ids=IDS))
    for output, expected in zip(got, plain, strict=True):
        assert torch.equal(output.logits, expected)


async def test_the_model_is_frozen_and_unchanged(base: Any) -> None:
    before = {name: value.clone() for name, value in base.state_dict().items()}
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        await client.train_step(BATCH, adamw(client.model))
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert all(parameter.grad is None for parameter in base.parameters())
    for name, value in base.state_dict().items():
        assert torch.equal(value, before[name])


class Asked(NoLockstep):
    """A policy that decides about every request, as a rate limit does."""

    lone_at_once = False


@pytest.mark.parametrize(("policy", "reason"), [(NoLockstep(), "lone"), (Asked(), "at-once")])
async def test_a_lone_request_runs_at_once_unless_the_policy_must_decide(
    base: Any, policy: NoLockstep, reason: str
) -> None:
    async with symbiosis.Executor(base, policy=policy) as executor, executor.client(LoraConfig(r=2)) as client:
        out = await client.forward(input_ids=IDS, labels=IDS)
        executor.reset_statistics()
        await client.backward(out.loss)
        statistics = executor.statistics()
        assert statistics.reasons[reason] == statistics.batches == statistics.requests > 10
        assert statistics.rows == sum(client.rows for client in statistics.clients.values())


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
async def test_a_lone_request_in_torch_modes_is_queued_so_that_they_do_not_affect_base_layers(
    base: Any, mode: Any
) -> None:
    seen = []
    layer = base.model.layers[0].mlp.down_proj
    hook = layer.register_forward_hook(
        lambda *_: seen.append((torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
    )
    try:
        async with symbiosis.Executor(base, base_layers="mlp") as executor, executor.client() as client:

            def forward() -> None:
                with mode():
                    client.model(input_ids=IDS)

            await client.run(forward)
            await client.forward(input_ids=IDS)
            assert "lone" in executor.statistics().reasons
    finally:
        hook.remove()
    assert len(seen) >= 2
    assert set(seen) == {(False, False)}


async def test_a_lone_client_lets_other_tasks_of_the_loop_run(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await client.generate(input_ids=IDS, max_new_tokens=80, min_new_tokens=80)
        task.cancel()
        assert turns >= 5
        assert executor.statistics().reasons["lone"] > 100


async def test_a_lone_request_that_fails_raises_and_the_next_one_is_served(
    base: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(LoraConfig(r=2)) as client:
        out = await client.forward(input_ids=IDS, labels=IDS)
        runner: Any = executor.engine.runner
        real = runner.run_alone
        runner.run_alone = lambda call: 1 / 0
        with pytest.raises(LayerError, match=r"lm_head failed on a batch of \d+ rows: division by zero"):
            await client.backward(out.loss)
        runner.run_alone = real
        assert "failed on a batch" in caplog.text
        await client.forward(input_ids=IDS)


async def test_threads_of_the_tenants_run_two_requests_at_once_at_most(base: Any) -> None:
    """Models that are called on threads are not in a walk. Still, one lone request runs at a time and the others are
    queued.
    """
    async with symbiosis.Executor(base) as executor:
        clients = [await executor.client().open() for _ in range(4)]
        engine: Any = executor.engine
        most: dict[str, int] = {}

        def counted(name: str, run: Any) -> Any:
            running = most[name] = 0

            def counting(*arguments: Any, **options: Any) -> Any:
                nonlocal running
                running += 1
                most[name] = max(most[name], running)
                try:
                    return run(*arguments, **options)
                finally:
                    running -= 1

            return counting

        engine._run_lone = counted("lone", engine._run_lone)
        engine.runner.run_alone = counted("all", engine.runner.run_alone)

        def forward(client: Any) -> None:
            for _ in range(5):
                client.model(input_ids=IDS)

        await asyncio.gather(*[asyncio.to_thread(forward, client) for client in clients])
        assert most["lone"] == 1
        assert most["all"] <= 2  # one more from the queue
        for client in clients:
            await client.close()


async def test_torch_modes_of_a_tenant_do_not_affect_others(base: Any) -> None:
    """The modes surround train_step, several operations of one client that wait for one another, or backward."""
    async with symbiosis.Executor(base) as executor:
        async with executor.client(LoraConfig(r=2)) as alice, executor.client(LoraConfig(r=2)) as bob:
            optimizers = [torch.optim.AdamW([p for p in c.model.parameters() if p.requires_grad]) for c in (alice, bob)]
            batch = {"input_ids": IDS, "labels": IDS}
            seen: set[tuple[bool, bool, bool]] = set()

            def modes() -> tuple[bool, bool, bool]:
                return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()

            async def with_modes() -> None:
                for _ in range(3):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        await alice.train_step(batch, optimizers[0])
                        assert torch.is_autocast_enabled("cpu")

            async def without_grad() -> None:
                with torch.no_grad():
                    await alice.forward(input_ids=IDS)
                    assert not torch.is_grad_enabled()

            async def bobs() -> None:
                for _ in range(6):
                    assert (await bob.forward(input_ids=IDS)).logits.dtype is torch.float32
                    await bob.train_step(batch, optimizers[1])
                    seen.add(modes())

            await asyncio.gather(with_modes(), *[without_grad() for _ in range(4)], bobs())
            assert seen == {(True, False, False)}
            assert modes() == (True, False, False)


async def test_modes_that_are_held_while_waiting_do_not_reach_base_layers(base: Any) -> None:
    expected = base(input_ids=IDS).logits
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0")

        def tenant() -> Any:
            with symbiosis.open_model(listener.address) as model:
                return model(input_ids=IDS).logits

        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = await in_thread(tenant)
    torch.testing.assert_close(logits, expected)


async def test_modes_around_several_clients_end_with_their_block(base: Any) -> None:
    """Joint walks begin and end apart from the clients' own code."""
    async with symbiosis.Executor(base) as executor:
        async with executor.client(LoraConfig(r=2)) as alice, executor.client(LoraConfig(r=2)) as bob:
            for _ in range(3):
                with torch.inference_mode():
                    await asyncio.gather(*(each.generate(input_ids=IDS, max_new_tokens=3) for each in (alice, bob)))
                assert not torch.is_inference_mode_enabled()
                optimizer = torch.optim.AdamW([p for p in alice.model.parameters() if p.requires_grad])
                await alice.train_step({"input_ids": IDS, "labels": IDS}, optimizer)
                await asyncio.sleep(0.1)  # the joint model is made meanwhile
                assert not torch.is_inference_mode_enabled()


async def test_the_default_device_is_no_mode_of_a_tenant(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        torch.set_default_device("meta")
        try:
            assert not in_modes()

            def device_in_the_middle() -> str:
                client.model.lm_head(torch.ones(1, 32, device="cpu"))
                return str(torch.empty(0).device)

            assert await client.run(device_in_the_middle) == "meta"
            with torch.device("cpu"):
                assert in_modes()
                with modes_aside():
                    assert str(torch.empty(0).device) == "meta"
        finally:
            torch.set_default_device(None)
        assert str(torch.empty(0).device) == "cpu"


@pytest.mark.parametrize("side", ["executor", "tenant"])
async def test_tensors_in_host_memory_whatever_the_default_device_is(base: Any, side: str) -> None:
    expected = base(input_ids=IDS).logits

    def tenant() -> Any:
        with symbiosis.open_model(listener.address) as model:
            torch.set_default_device("meta" if side == "tenant" else None)  # of this thread
            try:
                return model(input_ids=IDS).logits
            finally:
                torch.set_default_device(None)

    torch.set_default_device("meta" if side == "executor" else None)
    try:
        async with symbiosis.Executor(base) as executor:
            listener = await executor.listen("tcp://127.0.0.1:0")
            torch.testing.assert_close(await in_thread(tenant), expected)
    finally:
        torch.set_default_device(None)


async def test_hooks_that_one_tenant_disables_work_for_others(base: Any) -> None:
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        async with executor.client() as alice, executor.client() as bob:

            def forbidding() -> None:
                with torch.autograd.graph.disable_saved_tensors_hooks("alice says no"):
                    alice.model(input_ids=IDS)

            def hooked() -> None:
                with torch.autograd.graph.save_on_cpu():
                    bob.model(input_ids=IDS)

            await asyncio.gather(alice.run(forbidding), bob.run(hooked))
            assert executor.statistics().mean_batch > 1  # the tenants ran at the same time


@pytest.mark.usefixtures("stops_late")
@pytest.mark.parametrize("policy", ["lockstep", "no-lockstep", "opportunistic"])
async def test_two_clients_in_one_operation(base: Any, policy: str) -> None:
    """The second client is a reference or an assistant model. No batch waits for a client that waits for another
    client's request.
    """
    async with symbiosis.Executor(base, policy=policy) as executor:
        async with executor.client(LoraConfig(r=2, init_lora_weights=False)) as alice, executor.client() as reference:

            def both() -> tuple[torch.Tensor, torch.Tensor]:
                return alice.model(input_ids=IDS).logits, reference.model(input_ids=IDS).logits

            mine, theirs = await asyncio.wait_for(alice.run(both), 20)
            assert torch.equal(theirs, base(input_ids=IDS).logits)
            joint = mine.sum() + (await alice.forward(input_ids=IDS)).logits.sum()
            await asyncio.wait_for(alice.backward(joint), 20)


async def test_a_joint_backward_pass_of_two_clients_is_refused(base: Any) -> None:
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        async with executor.client(LoraConfig(r=2)) as alice, executor.client(LoraConfig(r=2)) as bob:
            one, two = await asyncio.gather(*[c.forward(input_ids=IDS, labels=IDS) for c in (alice, bob)])
            with pytest.raises(CannotWaitError, match="two clients"):
                await asyncio.wait_for(alice.backward(one.loss + two.loss), 20)


async def test_a_tensor_subclass_does_not_affect_other_tenants(base: Any) -> None:
    class Spy(torch.Tensor):
        seen: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append((func, args))
            return super().__torch_function__(func, types, args, kwargs or {})

    async with symbiosis.Executor(base, policy="lockstep") as executor:
        async with executor.client() as alice, executor.client() as bob:
            embedded = base.model.embed_tokens(IDS).detach().as_subclass(Spy)
            _, theirs = await asyncio.gather(
                alice.forward(inputs_embeds=embedded), bob.forward(inputs_embeds=embedded.as_subclass(torch.Tensor))
            )
            assert type(theirs.logits) is torch.Tensor
            assert not any(func is torch.cat and len(args[0]) == 2 and args[0][0].ndim == 2 for func, args in Spy.seen)


async def test_vmap_over_the_model_is_refused(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        with pytest.raises(CannotWaitError, match=r"torch\.func"):
            await client.run(lambda: torch.func.vmap(lambda ids: client.model(input_ids=ids[None]).logits)(IDS))


async def test_vmap_on_a_thread_is_refused(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        layer = client.model.model.layers[0].self_attn.o_proj
        with pytest.raises(CannotWaitError, match=r"torch\.func"):
            await asyncio.to_thread(torch.func.vmap(layer), torch.randn(3, 4, 32))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
async def test_dual_tensors_do_not_affect_other_tenants(base: Any) -> None:
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        async with executor.client() as alice, executor.client() as bob:

            def dual() -> None:
                layer = alice.model.model.layers[0].self_attn.q_proj
                with torch.autograd.forward_ad.dual_level():
                    layer(torch.autograd.forward_ad.make_dual(torch.randn(2, 32), torch.ones(2, 32)))

            refused, served = await asyncio.gather(alice.run(dual), bob.forward(input_ids=IDS), return_exceptions=True)
            assert isinstance(refused, CannotWaitError)
            torch.testing.assert_close(served.logits, base(input_ids=IDS).logits)


@pytest.mark.parametrize("who", ["client", "executor"])
async def test_closed_during_a_wait_for_another_clients_request(base: Any, who: str) -> None:
    executor = symbiosis.Executor(base)
    await executor.start()
    alice, bob = await executor.client().open(), await executor.client().open()

    def forever() -> None:
        while True:
            bob.model(input_ids=IDS)

    task = asyncio.create_task(alice.run(forever))
    await asyncio.sleep(0.05)
    await (alice.close() if who == "client" else executor.close())
    with pytest.raises((ClientClosedError, ExecutorClosedError)):
        await asyncio.wait_for(task, 20)
    await alice.close()
    await bob.close()
    await executor.close()


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
async def test_subclass_inputs_train(base: Any, base_layers: str) -> None:
    class Plain(torch.Tensor):
        pass

    async with (
        symbiosis.Executor(base, base_layers=base_layers) as executor,
        executor.client(LoraConfig(r=2)) as client,
    ):
        embedded = base.model.embed_tokens(IDS).detach().as_subclass(Plain)
        out = await client.forward(inputs_embeds=embedded, labels=IDS)
        await client.backward(out.loss)
        assert all(p.grad is not None for p in client.model.parameters() if p.requires_grad)


async def test_a_client_that_stopped_in_a_walk_is_not_waited_for(base: Any) -> None:
    """A client may be in a debugger, or send BEGIN and no request: others wait for it once, for a limited time."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        async with executor.client(name="stopped") as stopped, executor.client(name="works") as works:
            channel = stopped._channel
            assert channel is not None
            channel.begin_walk()
            began = time.monotonic()
            await asyncio.wait_for(works.forward(input_ids=IDS), 12)  # lockstep: each layer would wait for the other
            assert time.monotonic() - began > 0.9
            again = asyncio.create_task(works.forward(input_ids=IDS))
            await asyncio.wait_for(stopped.forward(input_ids=IDS), 12)  # the client continues and counts again
            await asyncio.wait_for(again, 12)


class Event:
    """An event of a GPU that it passes when the test says so."""

    passed = False

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, later: Event) -> float:
        return 7.0


async def test_policies_get_the_time_of_the_gpu(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel launches return at once. Events here complete when the test says so; tests/test_gpu.py has real ones."""

    class Notes(NoLockstep):
        lone_at_once = False
        seen: ClassVar[list[float]] = []

        def ran(self, batch: Batch, seconds: float) -> None:
            self.seen.append(seconds)

    clock = DeviceClock(torch.device("cpu"))
    monkeypatch.setattr(Event, "passed", False)
    monkeypatch.setattr(clock, "mark", Event)
    async with symbiosis.Executor(base, policy=Notes()) as executor, executor.client() as client, executor.client():
        executor.engine.device_clock = clock
        await client.generate(input_ids=IDS, max_new_tokens=2)
        batches = executor.statistics().batches
        assert batches > 0
        assert not Notes.seen
        Event.passed = True
        await client.forward(input_ids=IDS)
        assert len(Notes.seen) >= batches
        assert set(Notes.seen) == {7e-3}


async def test_little_is_launched_ahead_of_a_gpu(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched batches cannot be overtaken, so the next one waits while the GPU has enough to do."""
    clock = DeviceClock(torch.device("cpu"))
    monkeypatch.setattr(Event, "passed", False)
    monkeypatch.setattr(clock, "mark", Event)
    monkeypatch.setattr("symbiosis.executor.engine.AHEAD_S", 0.0)
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        executor.engine.device_clock = clock
        prompt = asyncio.create_task(client.forward(input_ids=IDS))
        await until(lambda: executor.statistics().batches == 1)
        await asyncio.sleep(0.05)
        assert executor.statistics().batches == 1
        assert clock.ahead_s > 0
        Event.passed = True
        await prompt
        assert executor.statistics().batches > 1
        assert clock.ahead_s >= 0


async def test_decode_rows_do_not_tell_how_long_prompts_take(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU 40 decode rows take as long as one, because the weights are read once."""
    learned: list[int] = []
    clock = DeviceClock(torch.device("cpu"))
    monkeypatch.setattr(Event, "passed", True)
    monkeypatch.setattr(clock, "mark", Event)
    monkeypatch.setattr(Pace, "learn", lambda self, key, rows, seconds: learned.append(rows))
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        executor.engine.device_clock = clock
        await client.generate(input_ids=IDS[:1, :4].repeat(40, 1), max_new_tokens=3)
        assert executor.statistics().clients[client.name].tokens["decode"] > 0
    assert 160 in learned
    assert learned.count(40) == 1  # lm_head, for the prompts' last tokens


@pytest.mark.parametrize("clients", [1, 2])
async def test_a_device_that_has_failed(base: Any, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants get an error, in batches of one client and from the queue, and do not wait for ever."""

    def mark() -> None:
        raise RuntimeError("device-side assert triggered")

    clock = DeviceClock(torch.device("cpu"))
    monkeypatch.setattr(clock, "mark", mark)
    monkeypatch.setattr(clock, "done", mark)
    async with symbiosis.Executor(base) as executor, contextlib.AsyncExitStack() as stack, asyncio.timeout(20):
        opened = [await stack.enter_async_context(executor.client()) for _ in range(clients)]
        executor.engine.device_clock = clock
        for ahead_s in (0.0, 10.0):
            monkeypatch.setattr(clock, "ahead_s", ahead_s)
            calls = [client.forward(input_ids=IDS) for client in opened]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, LayerError) and "device-side" in str(error) for error in errors), errors
        executor.engine.device_clock = None


async def test_an_address_that_opens_while_the_executor_closes(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        opening = asyncio.create_task(executor.listen("tcp://127.0.0.1:0"))
        await asyncio.sleep(0)
    with pytest.raises(ExecutorClosedError):
        await opening


@pytest.mark.parametrize(
    ("architecture", "layers"), [("llama", "linear"), ("llama", "mlp"), ("mixtral", "linear"), ("qwen2-moe", "linear")]
)
async def test_a_token_that_goes_through_all_layers_counts_one(architecture: str, layers: str) -> None:
    """MLPs that are served whole have inner layers in the table too. A row chooses some experts of a bank, and goes
    through a shared expert too."""
    model = tiny_model(architecture) if architecture == "llama" else mixture(architecture)
    async with (
        symbiosis.Executor(model, base_layers=layers, policy="fair+no-lockstep") as executor,
        executor.client(name="ann") as ann,
    ):
        await ann.forward(input_ids=IDS)
        head = [spec.layer for spec in executor.layers if spec.name == "lm_head"]
        part = sum(executor.engine.scheduler.parts[number] for number in head)
        assert part == pytest.approx(model.lm_head.weight.numel() / _multiplied(model))
        assert executor.engine.scheduler.policy.service() == pytest.approx({"ann": IDS.numel()})


def _multiplied(model: Any) -> int:
    """Return the number of weights of base layers, with biases, that a token is multiplied with."""
    named = dict(model.model.layers.named_parameters())
    linear = [name for name, weight in named.items() if weight.ndim == 2 and ".gate." not in name]
    single = sum(named[name].numel() for name in [*linear, *(one for one in named if one.endswith("bias"))])
    of_expert = sum(weight[0].numel() for weight in named.values() if weight.ndim == 3)
    chosen = getattr(model.config, "num_experts_per_tok", 0)
    return int(single + chosen * of_expert + model.lm_head.weight.numel())
