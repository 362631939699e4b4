"""One model on several executors, each of which serves a part of its base layers."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.registry import addresses_in, make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import (
    ConnectionLostError,
    PrivacyError,
    RefusedError,
    RequestError,
    ShareError,
    SplitError,
    UsageError,
)
from symbiosis.executor.share import client_side
from symbiosis.privacy import LocalPads, SecretShares
from symbiosis.testing import Job, run_job, run_job_plain, tiny_model
from symbiosis.testing.zoo import zoo_model
from symbiosis.transports.model_parts import merge
from tests.helpers import IDS, LOGITS, METHODS, SHORT, assert_close, in_thread, lora, until
from tests.moe import mixture
from tests.service import Service, free_port, save_model

MODELS = {
    "llama": lambda: tiny_model("llama"),
    "gpt2": lambda: tiny_model("gpt2"),  # its lm_head is the embedding
    "mixture": lambda: mixture("mixtral"),
}


@asynccontextmanager
async def divided(
    folder: Path, model: nn.Module, parts: Sequence[str] = ("0", "1,lm_head"), **options: Any
) -> AsyncIterator[tuple[list[symbiosis.Executor], str]]:
    """Executors of parts of a model, by turns at ``shm://`` and ``tcp://``, and their addresses."""
    if not any("lm_head" in name and isinstance(module, nn.Linear) for name, module in model.named_modules()):
        parts = [part.replace(",lm_head", "") for part in parts]
    executors = [symbiosis.Executor(copy.deepcopy(model), layers=part, **options) for part in parts]
    addresses = []
    async with AsyncExitStack() as stack:
        for number, executor in enumerate(executors):
            await stack.enter_async_context(executor)
            address = "tcp://127.0.0.1:0" if number % 2 else f"shm://{folder}/{number}.sock"
            addresses.append((await executor.listen(address)).address)
        yield executors, ",".join(addresses)


@pytest.mark.parametrize(("method", "kind"), [("lora", "synchronous"), *((name, "coroutine") for name in METHODS)])
@pytest.mark.parametrize("architecture", MODELS)
async def test_results_are_those_of_plain_peft(architecture: str, method: str, kind: str, tmp_path: Path) -> None:
    """Three tenants train and generate, those of coroutines at once, over both transports."""
    model = MODELS[architecture]()
    if architecture == "mixture" and method == "ia3":
        pytest.skip("PEFT has no default targets of IA3 for mixtures")

    def config() -> Any:
        if architecture == "mixture" and method == "lora":
            return lora("llama", target_modules=["q_proj", "v_proj"])
        return METHODS[method]("gpt2" if architecture == "gpt2" else "llama")

    expected = [run_job_plain(copy.deepcopy(model), config(), SHORT, seed=seed) for seed in range(3)]
    async with divided(tmp_path, model) as (executors, addresses):
        if kind == "coroutine":
            async with symbiosis.connect(addresses) as base, AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(base.client(config(), seed=seed)) for seed in range(3)]
                outcomes = await asyncio.gather(*[run_job(client, SHORT) for client in clients])
        else:

            def work(seed: int) -> Any:
                with symbiosis.open_model(addresses) as opened:
                    return run_job_plain(opened, config(), SHORT, seed=seed)

            outcomes = [await in_thread(work, seed) for seed in range(3)]  # each sets torch's seed
        for outcome, plain in zip(outcomes, expected, strict=True):
            assert_close(outcome, plain)
        assert all(executor.statistics().requests for executor in executors)
        await until(lambda: not any(executor.status()["clients"] for executor in executors))


async def test_mlps_that_are_served_whole(tmp_path: Path) -> None:
    """The biases inside them are with every tenant too."""
    model = tiny_model("gpt2")
    async with divided(tmp_path, model, base_layers="mlp") as (_, addresses), symbiosis.connect(addresses) as base:
        async with base.client(lora("gpt2"), seed=0) as client:
            assert_close(await run_job(client, SHORT), run_job_plain(copy.deepcopy(model), lora("gpt2"), SHORT))


PRECISE = ["Llama", "Gemma2", "DeepseekV3", "HunYuanMoEV1"]


@pytest.mark.parametrize(
    "name", [f"{name}ForCausalLM" for name in PRECISE] + ["T5ForConditionalGeneration", "LlavaForConditionalGeneration"]
)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype",
    [None, "auto", "float16", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("float32", "bfloat16"))],
)
def test_precision_is_that_of_a_whole_model(name: str, saved: torch.dtype, dtype: str | None, tmp_path: Path) -> None:
    """Parts have the precision that transformers gives a whole model: rotary frequencies and some modules stay in fp32,
    and Gemma's scale is not rounded to the checkpoint's precision first."""
    zoo_model(name).to(saved).save_pretrained(tmp_path)
    whole, one, other = [
        symbiosis.Executor.from_pretrained(tmp_path, dtype=dtype, layers=layers).service.share()
        for layers in (None, "0", "1-2,*lm_head,*multi_modal*" if "Llava" in name else "1,lm_head")
    ]
    assert merge({"one": one.description, "other": other.description}) == whole.description
    for tensor, expected in zip(one.tensors.values(), whole.tensors.values(), strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.equal(expected)


async def test_a_client_alone_is_bit_equal(tmp_path: Path) -> None:
    model = tiny_model()
    async with divided(tmp_path, model) as (_, addresses), symbiosis.connect(addresses) as base:
        async with base.client() as client:
            assert (await client.forward(input_ids=IDS)).logits.equal(model(IDS).logits)


async def test_parts_are_described_as_the_whole(tmp_path: Path) -> None:
    """The fingerprint is that of an executor with all layers, so tenants may mix them up in time."""
    model = tiny_model()
    whole = symbiosis.Executor(copy.deepcopy(model)).service.share().description
    async with divided(tmp_path, model) as (_, addresses):
        shown = await in_thread(make_transport(addresses).look, addresses)
        backwards = ",".join(reversed(addresses_in(addresses)))
        assert shown.model == whole == (await in_thread(make_transport(backwards).look, backwards)).model
        assert [state["layers_elsewhere"] for state in shown.status["replicas"].values()] == [8, 7]


@pytest.mark.parametrize("listed", [True, False], ids=["its address is given", "its address is left out"])
async def test_a_part_is_shown_while_another_one_is_away(tmp_path: Path, listed: bool) -> None:
    """A cluster's list leaves out the addresses of executors that load."""
    file = tmp_path / "list"
    async with divided(tmp_path, tiny_model()) as (executors, addresses):
        first, second = addresses_in(addresses)
        file.write_text(f"{first}\n{second}\n" if listed else f"{first}\n")
        await executors[1].close()
        for address in [f"file://{file}", *[addresses] * listed]:
            replicas = (await in_thread(make_transport(address).look, address)).status["replicas"]
            assert replicas.pop(first)["layers_elsewhere"] == 8
            assert "serves 8 base layers" in replicas.pop(address)["error"]
            assert [(where, "no executor answers" in state["error"]) for where, state in replicas.items()] == [
                (second, True)
            ] * listed


async def test_no_weight_of_another_part_is_there_or_leaves(tmp_path: Path) -> None:
    """Biases of base layers are with every tenant, so each executor has all of them."""
    model = tiny_model("gpt2", tie_word_embeddings=False)
    async with divided(tmp_path, model) as (executors, _):
        for executor in executors:
            served = {spec.name for spec in executor.layers}
            tensors, *_ = client_side(executor.service._split)
            for spec in symbiosis.Executor(copy.deepcopy(model)).layers:
                weight: Any = executor.service._split.model.get_submodule(spec.name)._parameters["weight"]
                assert weight.is_meta == (spec.name not in served)
                assert f"{spec.name}.weight" not in tensors
                assert f"{spec.name}.bias" in tensors or not spec.bias


async def test_targets_are_divided(tmp_path: Path) -> None:
    """An executor with a part of the layers has a part of a token's time."""
    async with divided(tmp_path, tiny_model(), policy="co-serving:slo_ms=100,ttft_ms=1000") as (executors, addresses):
        assert sum(executor.service._split.fraction for executor in executors) == pytest.approx(1)
        for executor in executors:
            part = executor.service._split.fraction
            granted = executor.engine.join("alice", Terms(slo_ms=200), local=False)
            assert (granted.slo_ms, granted.ttft_ms) == pytest.approx((200 * part, 1000 * part))
        async with symbiosis.connect(addresses) as base, base.client(lora(), seed=0, slo_ms=300) as client:
            assert_close(await run_job(client, SHORT), run_job_plain(tiny_model(), lora(), SHORT))


async def test_a_client_is_in_a_walk_at_one_executor_at_a_time(tmp_path: Path) -> None:
    """Otherwise batches at the first part would wait for clients that are at the second."""
    async with divided(tmp_path, tiny_model()) as ((one, other), addresses):
        channel = await make_transport(addresses).connect(addresses, "client")

        def thinking() -> list[int]:
            return [executor.engine.scheduler.thinking for executor in (one, other)]

        rows = (torch.ones(1, 32),)
        last = len(channel.layers) - 1
        channel.begin_walk()
        await channel.send(Call(Key((0,), Pass.FORWARD), Kind.DECODE, rows))
        await until(lambda: thinking() == [1, 0])
        await channel.send(Call(Key((last,), Pass.FORWARD), Kind.DECODE, rows))
        await until(lambda: thinking() == [0, 1])
        channel.end_walk()
        await until(lambda: thinking() == [0, 0])
        with pytest.raises(RequestError, match="at several executors"):
            channel.send(Call(Key((0, last), Pass.FORWARD), Kind.DECODE, rows))
        with pytest.raises(RequestError, match="counted from 0"):
            channel.send(Call(Key((99,), Pass.FORWARD), Kind.DECODE, rows))
        channel.close()


class Held(Policy):
    """A policy that runs nothing while ``holds``."""

    name = "held"
    holds = False

    def decide(self, view: View, now: float) -> Decision:
        if self.holds:
            return Wait(now + 0.01)
        return Run(view.oldest.key, view.queues[view.oldest.key].take(view.max_rows), "not held")


@pytest.mark.parametrize("masked", [False, True])
async def test_a_task_that_is_cancelled_cancels_its_call(masked: bool, tmp_path: Path) -> None:
    model, policy = tiny_model(), Held()
    one = symbiosis.Executor(copy.deepcopy(model), layers="0", policy=policy)
    async with one, symbiosis.Executor(copy.deepcopy(model), layers="1,lm_head") as other:
        listeners = [await each.listen("tcp://127.0.0.1:0") for each in (one, other)]
        addresses = ",".join(listener.address for listener in listeners)
        privacy = LocalPads(model) if masked else None
        async with symbiosis.connect(addresses) as base, base.client(privacy=privacy) as client:
            await client.forward(input_ids=IDS)
            policy.holds = True
            task = asyncio.create_task(client.forward(input_ids=IDS))
            await until(lambda: one.status()["outstanding"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not one.status()["outstanding"])


async def test_joint_decoding(tmp_path: Path) -> None:
    job = Job(steps=0, new_tokens=8, sequences=1)
    expected = [run_job_plain(tiny_model(), lora(), job, seed=seed) for seed in range(3)]
    async with divided(tmp_path, tiny_model()) as (_, addresses), symbiosis.connect(addresses) as base:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(base.client(lora(), seed=seed)) for seed in range(3)]
            outcomes = await asyncio.gather(*[run_job(client, job) for client in clients])
        assert sum(counts.get("joint", 0) for counts in base.walks().values()) > 3
        for outcome, plain in zip(outcomes, expected, strict=True):
            assert_close(outcome, plain)


async def test_layers_of_two_executors_read_one_tensor(tmp_path: Path) -> None:
    """So do the projections to the first streams of Gemma 3n, and the heads of MusicGen."""
    model = tiny_model()
    x = torch.ones(3, 32)
    expected = [layer.self_attn.q_proj(x) for layer in model.model.layers]
    async with divided(tmp_path, model) as (_, addresses), symbiosis.connect(addresses) as base:
        async with base.client() as client:
            for _ in range(4):
                found = await client.run(lambda: [layer.self_attn.q_proj(x) for layer in client.model.model.layers])
                torch.testing.assert_close(found, expected)


async def test_masked_rows(tmp_path: Path) -> None:
    model = tiny_model()
    expected = model(IDS).logits
    async with divided(tmp_path, model, ("0", "1,lm_head", "0", "1,lm_head")) as (executors, addresses):
        one, other, *further = addresses_in(addresses)
        first, second = f"{one},{other}", ",".join(further)
        for privacy in (LocalPads(copy.deepcopy(model)), SecretShares(with_=second, model=copy.deepcopy(model))):
            async with symbiosis.connect(first) as base, base.client(privacy=privacy) as client:
                found = (await client.forward(input_ids=IDS)).logits
                torch.testing.assert_close(found, expected, atol=100 * LOGITS, rtol=0)
        assert all(executor.statistics().requests for executor in executors)
        async with symbiosis.connect(first) as base:
            with pytest.raises(PrivacyError, match="same executor"):
                await base.client(privacy=SecretShares(with_=f"{further[0]},{other}")).open()


async def test_another_replica_of_a_part_goes_on(tmp_path: Path) -> None:
    """The addresses of replicas and parts are in one list; which is which follows from what they serve."""
    parts = ("0", "1,lm_head", "1,lm_head", "0")
    async with divided(tmp_path, tiny_model(), parts) as (executors, addresses), symbiosis.connect(addresses) as base:
        async with base.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, Job(steps=12)))
            for number in (1, 0):
                await until(lambda number=number: executors[number].statistics().requests > 60)  # type: ignore[misc]
                await executors[number].close()
            assert_close(await job, run_job_plain(tiny_model(), lora(), Job(steps=12)))
        assert all(executor.statistics().requests for executor in executors)


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_list_leaves_out_a_part_while_its_executor_starts_again(lost: int, tmp_path: Path) -> None:
    """The other part answers, and does not serve another model. A client waits for the part that it has lost."""
    kept, again = 1 - lost, symbiosis.Executor(tiny_model(), layers=("0", "1,lm_head")[lost])
    async with divided(tmp_path, tiny_model()) as (executors, addresses), again:
        every = addresses.split(",")
        (listed := tmp_path / "list").write_text("\n".join(every))
        async with symbiosis.connect(f"file://{listed}", retry=20) as base, base.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, Job(steps=12)))
            await until(lambda: executors[lost].statistics().requests > 20)
            listed.write_text(every[kept])
            await executors[lost].close()
            await asyncio.sleep(0.5)
            assert not job.done()
            new = await again.listen(f"shm://{tmp_path}/again.sock")
            listed.write_text(f"{every[kept]}\n{new.address}")
            assert_close(await job, run_job_plain(tiny_model(), lora(), Job(steps=12)))
        assert again.statistics().requests


async def test_a_part_that_is_not_listed_again_ends_clients(tmp_path: Path) -> None:
    async with divided(tmp_path, tiny_model()) as (executors, addresses):
        (listed := tmp_path / "list").write_text(addresses.replace(",", "\n"))
        async with symbiosis.connect(f"file://{listed}", retry=0.5) as base, base.client() as client:
            listed.write_text(addresses.split(",")[0])
            await executors[1].close()
            with torch.no_grad(), pytest.raises(ConnectionLostError, match="no executor of this part of the model"):
                await client.forward(input_ids=IDS)


def test_parts_of_a_checkpoint_in_processes_of_their_own(tmp_path: Path) -> None:
    """Each is killed between forward and backward, and started again. Losses are those of plain PEFT."""
    from peft import get_peft_model

    from tests.transports.test_replicas import losses

    checkpoint = save_model(tmp_path / "model")
    addresses = [f"shm://{tmp_path}/one.sock", f"tcp://127.0.0.1:{free_port()}"]
    with ExitStack() as stack:
        services = [
            stack.enter_context(Service(checkpoint, address, "--layers", part, "--no-packed"))
            for address, part in zip(addresses, ("0", "1,lm_head"), strict=True)
        ]

        def train(at: int, then: Any = None) -> list[float]:
            with symbiosis.open_model(",".join(addresses)) as model:
                torch.manual_seed(0)
                return losses(get_peft_model(model, lora()), 6, at, then)

        undisturbed = train(-1)
        for service in services:

            def replace(service: Service = service) -> None:
                service.kill()
                service.start()

            assert train(2, replace) == undisturbed
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), lora())
    assert undisturbed == losses(plain, 6)


async def test_gaps_and_contradictions(tmp_path: Path) -> None:
    model = tiny_model()

    async def refused(parts: Sequence[str], error: type[Exception], why: str, *further: str) -> None:
        async with divided(tmp_path, model, parts) as (executors, addresses):
            together = ",".join([addresses, *further])
            for connect in (
                lambda: make_transport(together).connect(together, "client"),
                lambda: in_thread(make_transport(together).connect_blocking, together, "client"),
                lambda: symbiosis.connect(together).__aenter__(),
            ):
                with pytest.raises(error, match=why):
                    await connect()
            assert not any(executor.status()["clients"] for executor in executors)

    await refused(("0", "1"), RefusedError, "serves 1 base layers: lm_head$")
    await refused(("0", "lm_head"), RefusedError, r"serves 7 base layers: model.layers.1.self_attn.q_proj, .*, …, ")
    await refused(("0",), ConnectionLostError, r"serves 8 base layers.*no executor answers", "shm:///nobody.sock")
    await refused(("0-1", "1,lm_head"), RefusedError, r"model.layers.1.self_attn.q_proj is served at .* and at")
    async with symbiosis.Executor(tiny_model(seed=1), layers="1,lm_head") as strange:
        listener = await strange.listen(f"shm://{tmp_path}/strange.sock")
        await refused(("0",), RefusedError, "different models .*: their client weights differ", listener.address)
    async with symbiosis.Executor(copy.deepcopy(model)) as whole:
        listener = await whole.listen(f"shm://{tmp_path}/whole.sock")
        await refused(("0",), RefusedError, "the same layers, or no layer in common", listener.address)


def test_a_divided_block_is_refused() -> None:
    """Layers that read the same rows are asked together, so one executor must have them."""
    name = "model.layers.0.self_attn."
    order = [f"{name}q_proj", f"{name}k_proj"]
    parts = {
        address: {"order": order, "layers": [[0, own, 32, 32, "float32"]], "layer_weights": [own]}
        for address, own in zip("ab", order, strict=True)
    }
    with pytest.raises(RefusedError, match=r"model.layers.0 is divided between a and b; serve blocks whole"):
        merge(parts)


@pytest.mark.parametrize("connects", [True, False])
async def test_the_address_of_one_part_is_not_enough(connects: bool, tmp_path: Path) -> None:
    """The other part has no values in the client's process. Without an error, logits would be NaN."""
    async with divided(tmp_path, tiny_model()) as (_, addresses):
        address = addresses_in(addresses)[0]

        def opened() -> None:
            with symbiosis.open_model(address):
                pass

        async def connected() -> None:
            async with symbiosis.connect(address) as base, base.client():
                pass

        with pytest.raises(ShareError, match=r"is neither served nor sent.* give the addresses of all parts"):
            await (connected() if connects else in_thread(opened))


async def test_wrong_use() -> None:
    model = tiny_model()
    none = "there is no block {}; there are blocks 0 to 1, and lm_head"
    for wrong, why in (("7", none.format(7)), ("0-2", none.format(2)), ("nose", "no base layer belongs to 'nose'")):
        with pytest.raises(SplitError, match=why):
            symbiosis.Executor(model, layers=wrong)
    for divided_ in ("*.mlp.*", "0,model.layers.1.mlp.up_proj"):
        with pytest.raises(SplitError, match=r"divides model.layers.[01]; serve blocks whole"):
            symbiosis.Executor(model, layers=divided_)
    for no_text in (0, [0, 1]):
        with pytest.raises(UsageError, match="give a text such as"):
            symbiosis.Executor(model, layers=no_text)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="allow_weights is for an executor that holds all weights"):
        symbiosis.Executor(model, layers="0", allow_weights=["*.q_proj"])
    async with symbiosis.Executor(copy.deepcopy(model), layers="0") as executor:
        with pytest.raises(UsageError, match="serves a part of the model"):
            executor.client()


SCRIPT = """
import gc, json, sys
import torch
import symbiosis

def memory():
    gc.collect()
    lines = [line for line in open("/proc/self/status") if line.startswith(("RssAnon:", "RssFile:"))]
    return sum(int(line.split()[1]) for line in lines) * 1024

small, large, layers, dtype = sys.argv[1:]
symbiosis.Executor.from_pretrained(small, packed=False)
before = memory()
executor = symbiosis.Executor.from_pretrained(large, packed=False, layers=layers, dtype=dtype or None)
executor.service.share()
for layer in executor.service._split.layers:
    layer.module.weight.sum()
grown, dtype = memory() - before, str(executor.layers[0].dtype)
print(json.dumps({"grown": grown, "served": executor.sharing.served, "dtype": dtype}))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell memory")
@pytest.mark.parametrize("dtype", ["", pytest.param("float32", marks=pytest.mark.thorough)])
def test_the_other_part_is_not_loaded(dtype: str, tmp_path: Path) -> None:
    """Memory, that of mapped files included, grows by little more than the weights that are served."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    for name, options in (("small", {}), ("large", {**sizes, "num_hidden_layers": 6})):
        tiny_model("llama", **options).to(torch.bfloat16).save_pretrained(tmp_path / name)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        SCRIPT,
        str(tmp_path / "small"),
        str(tmp_path / "large"),
        "0",
        dtype,
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert found["dtype"] == f"torch.{dtype or 'bfloat16'}"
    assert found["served"] == 1024 * 1024 * 16 * (4 if dtype else 2)
    assert found["grown"] < found["served"] * 1.5, "the whole model is six times as large"
