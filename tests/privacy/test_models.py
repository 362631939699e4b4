"""Masked clients compared with plain transformers + PEFT, and the rows that their executors receive.

Tolerances are relative to the largest element of each tensor. They follow from the scale of the noise: a product in
fp32 has an error of at most 1.5e-6 · scale (tests/privacy/masking.py), and a model a few times as much. Noise comes
from fixed keys here, so that all runs are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

import symbiosis
from symbiosis.core.requests import Key, Pass
from symbiosis.errors import PrivacyError
from symbiosis.executor.layers import base_layer, is_linear
from symbiosis.privacy import LocalPads, NoisePool, SecretShares, Seen, Wiretap, keystream, local_pads
from symbiosis.privacy.amplitude import DEFAULT_SCALE, WRAPPED_SCALE
from symbiosis.privacy.audit.evidence import Place
from symbiosis.privacy.audit.workload import Recorder
from symbiosis.privacy.local_pads import Pads
from symbiosis.privacy.own_weights import _PlainWeight
from symbiosis.privacy.typical_sizes import TypicalSizes
from symbiosis.testing import Comparison, Job, Outcome, run_job, run_job_plain, tiny_model
from symbiosis.testing.formats import FORMATS, model_in
from tests.helpers import BATCH, IDS, METHODS, SHORT, adamw, crowd, lora, until

SCHEMES = ("noise-pool", "local-pads", "secret-shares", "wrapped-shares")
ALL = pytest.mark.parametrize("name", SCHEMES)
EFFECTS = {"noise-pool": 5}
"""Vectors that the executor is sent for their effects, by scheme."""
SCALE = 16.0
LOGITS, GRADIENTS, TRAINED = 1e-4, 2e-4, 2e-2
"""Tolerances at this scale. AdamW divides by the size of a gradient, so small trained elements differ more."""
JOB = Job(steps=8)


@pytest.fixture(autouse=True)
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(5)
    for module in (keystream, local_pads):
        monkeypatch.setattr(module, "os", _Fixed(generator))


class _Fixed:
    """The module ``os`` with another source of random bytes."""

    def __init__(self, generator: random.Random) -> None:
        self.urandom = generator.randbytes

    def __getattr__(self, name: str) -> Any:
        import os

        return getattr(os, name)


def scheme(name: str, model: Any, scale: float = SCALE, **options: Any) -> Any:
    """Return a scheme for a client of ``inproc://one``; the other executor is ``inproc://two``."""
    if name == "noise-pool":
        return NoisePool(**{"size": EFFECTS[name], "refresh": 40, "scale": scale, **options})
    if name == "local-pads":
        return LocalPads(model, **{"rows": 8, "scale": scale, **options})
    own = model if name == "wrapped-shares" else None
    return SecretShares("inproc://two", model=own, scale=scale, **options)


@contextlib.asynccontextmanager
async def executors(model: Any, name: str = "secret-shares", **options: Any) -> AsyncIterator[list[symbiosis.Executor]]:
    """Run one executor, or two for shares."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(symbiosis.Executor(copy.deepcopy(model), name=number, **options))
            for number in ("one", "two")[: 1 + name.endswith("shares")]
        ]


def assert_agrees(outcome: Outcome, expected: Outcome, factor: float = 1.0) -> None:
    comparison = Comparison.of(outcome, expected)
    assert comparison.worst("logits") <= LOGITS * factor, comparison
    assert comparison.worst("greedy") == 0, comparison
    assert comparison.worst("sampled") == 0, comparison
    assert comparison.worst("gradient") <= GRADIENTS * factor, comparison
    assert comparison.worst("losses") <= GRADIENTS * factor, comparison
    assert comparison.worst("adapter") <= TRAINED, comparison


@ALL
@pytest.mark.parametrize(
    ("architecture", "method"), [("llama", "lora"), ("llama", "ia3"), ("llama", "prefix"), ("gpt2", "lora")]
)
async def test_generation_and_training(architecture: str, method: str, name: str) -> None:
    """Logits, generated tokens, gradients, losses and the adapter agree, for models with and without biases."""
    model = tiny_model(architecture)
    config = METHODS[method](architecture)
    expected = run_job_plain(model, config, JOB)
    async with executors(model, name) as (one, *_):
        async with one.client(copy.deepcopy(config), seed=0, privacy=scheme(name, model)) as client:
            assert_agrees(await run_job(client, JOB), expected)


@ALL
async def test_at_the_default_scale(name: str) -> None:
    """Errors grow in proportion to the scale."""
    model = tiny_model("llama")
    expected = run_job_plain(model, lora(), JOB)
    async with executors(model, name) as (one, *_):
        async with one.client(lora(), seed=0, privacy=scheme(name, model, DEFAULT_SCALE)) as client:
            assert_agrees(await run_job(client, JOB), expected, DEFAULT_SCALE / SCALE)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
async def test_narrow_models(dtype: torch.dtype, name: str) -> None:
    """Rows are masked in fp32, so results are closer to exact products than the rounding of the model's own dtype."""
    model = tiny_model("llama", dtype=dtype)
    exact = run_job_plain(tiny_model("llama", dtype=dtype).float(), None, Job(steps=0, new_tokens=0))
    plain = run_job_plain(model, None, Job(steps=0, new_tokens=0))
    async with executors(model, name) as (one, *_), one.client(privacy=scheme(name, model, 256.0)) as client:
        masked = await run_job(client, Job(steps=0, new_tokens=0))
    assert exact.logits is not None
    assert plain.logits is not None
    assert masked.logits is not None
    assert masked.logits.dtype is dtype
    assert (masked.logits - exact.logits).norm() <= 1.1 * (plain.logits - exact.logits).norm()


@ALL
async def test_training_in_bf16(name: str) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    expected = run_job_plain(model, lora(), Job(new_tokens=0))
    async with executors(model, name) as (one, *_), one.client(lora(), seed=0, privacy=scheme(name, model)) as client:
        outcome = await run_job(client, Job(new_tokens=0))
    comparison = Comparison.of(outcome, expected)
    assert comparison.worst("losses") <= 2.0**-8, comparison


@ALL
async def test_mlps_served_whole_run_on_the_client(name: str) -> None:
    """The linear layers of the MLP are requested. The module itself, which is not linear, is never requested."""
    model = tiny_model("llama")
    expected = run_job_plain(model, lora(target_modules=["q_proj"]), JOB)
    async with executors(model, name, base_layers="mlp") as (one, *others):
        with contextlib.ExitStack() as stack:
            taps = [stack.enter_context(Wiretap(executor)) for executor in (one, *others)]
            config = lora(target_modules=["q_proj"])
            async with one.client(config, seed=0, privacy=scheme(name, model)) as client:
                assert_agrees(await run_job(client, JOB), expected)
        for tap in taps:
            assert all(one.layers[layer].linear for seen in tap.seen for layer in seen.key.layers)


async def test_nonlinear_layers_without_weights_at_the_client_are_refused(base: Any) -> None:
    """A tenant in another process lacks the weights of an MLP that is served whole, without its linear layers."""
    async with symbiosis.Executor(base, base_layers=["*.mlp", "*_proj"]) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0")
        async with symbiosis.connect(listener.address, privacy="noise-pool") as remote, remote.client() as client:
            await client.forward(input_ids=IDS)  # the linear layers of the MLP are served
    async with symbiosis.Executor(base, base_layers=["*.mlp"]) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0")
        with Wiretap(executor) as tap:
            async with symbiosis.connect(listener.address, privacy="noise-pool") as remote, remote.client() as client:
                with pytest.raises(PrivacyError, match="mlp"):
                    await client.forward(input_ids=IDS)
        assert not tap.seen


async def test_biases_that_the_tenant_trains() -> None:
    """Such layers are requested without their bias, which is another key with other noise."""
    model = tiny_model("gpt2")
    config = lora("gpt2", bias="all")
    expected = run_job_plain(model, config, JOB)
    for name in SCHEMES:
        async with executors(model, name) as (one, *_):
            async with one.client(copy.deepcopy(config), seed=0, privacy=scheme(name, model)) as client:
                assert_agrees(await run_job(client, JOB), expected)


@ALL
async def test_beside_other_clients_and_under_other_policies(name: str) -> None:
    """A scheme does not see the policy, so each has one."""
    model = tiny_model("llama")
    expected = run_job_plain(model, lora(), SHORT)
    others = [(lora(), "train"), (None, "generate")]
    policies = ["opportunistic", "lockstep", "fair+co-serving:slo_ms=20", "no-lockstep"]
    async with executors(model, name, policy=policies[SCHEMES.index(name)]) as (one, *_), crowd(one, others):

        async def tenant() -> Outcome:
            async with one.client(lora(), seed=0, privacy=scheme(name, model)) as client:
                return await run_job(client, SHORT)

        for outcome in await asyncio.gather(tenant(), tenant()):
            assert_agrees(outcome, expected, 2.0)


@ALL
async def test_windows_and_checkpoints(name: str) -> None:
    model = tiny_model("llama")
    async with executors(model, name) as (one, *_):
        losses = []
        for privacy in (None, scheme(name, model)):
            async with one.client(lora(lora_dropout=0.0), seed=0, privacy=privacy) as client:
                optimizer = adamw(client.model)
                mine = [await client.train_step(BATCH, optimizer, window=4)]
                client.model.gradient_checkpointing_enable()
                mine.append(await client.train_step(BATCH, optimizer))
                losses.append(mine)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# Rows that executors receive.


def of_rows(seen: list[Seen], name: str) -> list[Seen]:
    """Return calls with rows, without those for effects of noise.

    LoRA needs no pass without a bias, and no backward pass of these tests has as few rows as a pool has vectors.
    """
    if name not in EFFECTS:
        return seen
    return [
        one
        for one in seen
        if (one.tensors[0].shape[0] != EFFECTS[name] if one.key.pass_.is_backward else one.key.pass_ is Pass.FORWARD)
    ]


_BLOCK = 8


def assert_masked(sent: torch.Tensor, own: torch.Tensor) -> None:
    """Check that no column of sent rows [n, w] is nearly bare, and that no part of a row is near that of a true row.

    ``own`` has the true row of each row of one key. Rows count in units of the size of their true row.
    """
    there = own.norm(dim=1) > 0
    sent, own = sent[there].float(), own[there].float()
    size = own.norm(dim=1, keepdim=True)
    column = (sent / size).norm(dim=0)
    assert ((own / size).norm(dim=0) < 0.2 * column).all()
    assert (((sent - own) / size).norm(dim=0) > 0.8 * column).all()
    assert_far(sent, own, 0.5)


def assert_uniform(sent: torch.Tensor, own: torch.Tensor) -> None:
    """Check that sent rows [n, w] do not depend on their true rows, for rows of any size.

    No column correlates with the true one, and no part of a row is near that part of a true row.
    """
    there = own.norm(dim=1) > 0
    sent, own = sent[there].float(), own[there].float()
    assert_far(sent, own, 0.05)
    sent, own = sent - sent.mean(dim=0), own - own.mean(dim=0)
    alike = torch.nn.functional.cosine_similarity(sent, own, dim=0)
    assert (alike.abs() < 6.5 / len(sent) ** 0.5).all()


def units(sent: torch.Tensor) -> torch.Tensor:
    """Return the numbers of one request in units of their amplitude.

    At least one of 32 or more uniform numbers is in the upper half of its range.
    """
    return sent / 2.0 ** math.ceil(math.log2(sent.abs().max().item()))


def assert_far(sent: torch.Tensor, own: torch.Tensor, least: float) -> None:
    """Check that each block of columns is at least ``least`` times its size away from that of every true row."""
    for start in range(0, sent.shape[1], _BLOCK):
        block = sent[:, start : start + _BLOCK].contiguous()
        near = torch.cdist(block, own[:, start : start + _BLOCK].float().contiguous()).amin(dim=1)
        assert (near > least * block.norm(dim=1)).all()


def test_rows_that_are_not_uniform_are_detected() -> None:
    """The rows are a bare row, a bare column, and noise as large as the rows that is added without wrapping."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(2000, 64, generator=generator)
    noise = 2 * torch.rand(2000, 64, generator=generator) - 1
    whole = torch.remainder(own + noise + 1, 2) - 1
    assert_uniform(whole, own)
    row, column = whole.clone(), whole.clone()
    row[7], column[:, 7] = own[7], own[:, 7]
    for sent in (own, row, column, own + noise):
        with pytest.raises(AssertionError):
            assert_uniform(sent, own)


def test_bare_columns_are_detected() -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(200, 64, generator=generator)
    noise = 256 * (2 * torch.rand(200, 64, generator=generator) - 1)
    assert_masked(own + noise, own)
    half, one, some, weak = noise.clone(), noise.clone(), noise.clone(), noise.clone()
    half[:, ::2] = 0
    one[:, 17] = 0
    some[5, 8:16] = 0
    weak[:, 40] *= 0.01
    for masks in (half, one, some, weak):
        with pytest.raises(AssertionError):
            assert_masked(own + masks, own)
    with pytest.raises(AssertionError):
        assert_masked(own + noise, own.roll(1, 0) + 0.7 * noise)  # the row contains the true row of another row


@ALL
@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.float32), ("gpt2", torch.float32), ("llama", torch.bfloat16)], ids=str
)
async def test_no_bare_row_arrives(architecture: str, dtype: torch.dtype, name: str) -> None:
    """Every row that an executor receives in fine-tuning and generation is compared with its true row.

    Its correlation with the true row is at most that of noise of this size, as the mean over thousands of rows shows.
    """
    model = tiny_model(architecture, dtype=dtype)
    exact = name in ("local-pads", "wrapped-shares")
    scale = WRAPPED_SCALE if exact else DEFAULT_SCALE
    async with executors(model, name) as (one, *others):
        with contextlib.ExitStack() as stack:
            taps = [stack.enter_context(Wiretap(executor)) for executor in (one, *others)]
            async with one.client(lora(architecture), seed=0, privacy=scheme(name, model, scale)) as client:
                recorder = client.wrap_channel(Recorder)
                await run_job(client, Job())
    for tap in taps:
        came: dict[Place, list[torch.Tensor]] = {}
        meant: dict[Place, list[torch.Tensor]] = {}
        rows = of_rows(tap.seen, name)
        for seen, (place, own, _) in zip(rows, recorder.calls, strict=True):
            assert Place.of(seen.key) == place
            assert own.dtype is dtype
            came.setdefault(place, []).append(seen.tensors[0])
            meant.setdefault(place, []).append(own)
        cosines = []
        for place, parts in came.items():
            sent, own = torch.cat(parts), torch.cat(meant[place])
            assert sent.dtype is torch.float32
            (assert_uniform if exact else assert_masked)(sent, own)
            cosines.append(torch.nn.functional.cosine_similarity(sent, own.float()))
        ids = {id(seen) for seen in rows}
        for seen in tap.seen:
            if id(seen) not in ids:  # sent for its effects only
                assert_far(seen.tensors[0], torch.cat(meant[Place.of(seen.key)]), 0.02)
        if exact:
            numbers = torch.cat([units(seen.tensors[0]).flatten() for seen in tap.seen]).double()
            assert abs(3 * numbers.square().mean() - 1) < 6 * 0.9 / len(numbers) ** 0.5
        alike = torch.cat(cosines)
        alike = alike[alike.isfinite()]
        assert len(alike) > 3000
        # The mean cosine of x and x + n is at most |x| / |n|; the rest is chance, for rows of 32 numbers or more.
        bound = (0.0 if exact else 3**0.5 / scale) + 6 / (32 * len(alike)) ** 0.5
        assert alike.mean().abs() < (
            bound if name != "noise-pool" else 0.1
        )  # a pool has few vectors, which are used often


def with_outliers(model: Any) -> Any:
    """Make the rows of a few tokens far larger than others in each block, as in large models."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        weights = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        direction = torch.randn(weights[0].shape[1], generator=generator)
        for weight in weights:
            weight.data[:4] += 3 * direction / direction.norm()
    return model


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "outliers"])
@pytest.mark.parametrize("name", ["local-pads", "wrapped-shares"])
async def test_first_requests_show_no_sizes(architecture: str, name: str) -> None:
    """With a client for each text, different amplitudes would identify equal texts. All texts have the same one."""
    if architecture == "outliers":
        model = with_outliers(tiny_model("llama", hidden_size=64, num_hidden_layers=4, intermediate_size=128))
    else:
        model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(7)
    config = LoraConfig(fan_in_fan_out=architecture == "gpt2")  # the adapter starts at zero and grows
    amplitudes = set()
    async with executors(model, name) as (one, *_):
        for _ in range(6):
            ids = torch.randint(2, 60, (2, 9), generator=generator)
            with Wiretap(one) as tap:
                async with one.client(config, seed=0, privacy=scheme(name, model)) as client:
                    await client.generate(input_ids=ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
                    await client.train_step({"input_ids": ids, "labels": ids}, adamw(client.model))
            # The largest of 32 or more uniform numbers is in the upper half of the amplitude.
            largest = [float(seen.tensors[-1].abs().max()) for seen in tap.seen]
            amplitudes.add(tuple(math.ceil(math.log2(size)) for size in largest))
    assert len(amplitudes) == 1


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_typical_sizes(architecture: str) -> None:
    """Every layer has a typical size of rows and of gradients, and the tenant's model stays unchanged."""
    if architecture == "t5":
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
        model: Any = T5ForConditionalGeneration(config).eval()
    else:
        model = tiny_model(architecture)
    model.requires_grad_(True).train()
    modules = {index: module for index, module in enumerate(model.modules()) if is_linear(module)}
    specs = {index: base_layer(index, "", module).spec for index, module in modules.items()}
    random_state = torch.get_rng_state()
    usual = TypicalSizes(model, specs, modules)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules.values())
    for index in modules:
        for pass_ in (Pass.FORWARD, Pass.BACKWARD):
            assert usual.size(Key((index,), pass_)) > 0


async def test_the_wiretap_records_requests_of_a_client(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        async with executor.client(name="before") as before:
            with Wiretap(executor) as tap:
                async with executor.client(name="here") as client:
                    await client.forward(input_ids=IDS)
                await before.forward(input_ids=IDS)
            count = len(tap.seen)
            async with executor.client(name="after") as client:
                await client.forward(input_ids=IDS)
    assert count == len(tap.seen) == len(tap.of("here")) > 10
    assert [seen.number for seen in tap.seen] == list(range(count))
    with torch.no_grad():
        embedded = base.model.layers[0].input_layernorm(base.model.embed_tokens(IDS)).reshape(-1, 32)
        first = tap.seen[0]
        assert torch.equal(first.tensors[0], embedded)
        assert first.results is not None
        assert torch.equal(first.results[0], base.model.layers[0].self_attn.q_proj(embedded))
    assert all(seen.results is not None for seen in tap.seen)


# Other number formats.


@pytest.mark.parametrize(
    "name", [*SCHEMES[:2], *(pytest.param(name, marks=pytest.mark.thorough) for name in SCHEMES[2:])]
)
@pytest.mark.parametrize("format_", FORMATS)
async def test_number_formats(format_: str, name: str) -> None:
    """A masked client computes what a client without masks does, forward and backward, if weights are quantized too."""
    model, job = model_in("LlamaForCausalLM", FORMATS[format_]), Job(steps=1, new_tokens=0)
    async with executors(model, name) as (one, *_):
        async with one.client(lora(), seed=0) as client:
            expected = await run_job(client, job)
        async with one.client(lora(), seed=0, privacy=scheme(name, model)) as client:
            comparison = Comparison.of(await run_job(client, job), expected)
    narrow = FORMATS[format_].dtype is not torch.float32
    assert comparison.worst("logits") <= (2.0**-6 if narrow else LOGITS), comparison
    assert comparison.worst("gradient") <= (2.0**-5 if narrow else GRADIENTS), comparison


@ALL
async def test_layers_that_round_rows_to_another_dtype(name: str) -> None:
    """Layers in NF4 multiply in bf16 here, whatever the dtype of the rows. Masked rows would lose their last bits, and
    with them the tenant's numbers."""
    model, job = model_in("LlamaForCausalLM", FORMATS["bitsandbytes NF4"]), Job(steps=1, new_tokens=0)
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.bfloat16
    async with executors(model, name) as (one, *_):
        async with one.client(lora(), seed=0) as client:
            expected = await run_job(client, job)
        async with one.client(lora(), seed=0, privacy=scheme(name, model)) as client:
            comparison = Comparison.of(await run_job(client, job), expected)
    assert comparison.worst("logits") <= 2.0**-6, comparison
    assert comparison.worst("gradient") <= 2.0**-5, comparison


@pytest.mark.filterwarnings("ignore:Merge lora module")
@pytest.mark.parametrize("format_", ["bitsandbytes int8", "bitsandbytes NF4"])
async def test_a_quantized_model_that_an_adapter_is_merged_into(format_: str) -> None:
    """PEFT gives the layer another parameter."""
    model = model_in("LlamaForCausalLM", FORMATS[format_])
    own = copy.deepcopy(model)
    async with executors(model, "local-pads") as (one,), one.client(privacy=LocalPads(own)) as client:
        await client.forward(input_ids=IDS)
        merged(own)
        with pytest.raises(PrivacyError, match="up_proj of the tenant's model was changed"):
            await one.client(privacy=LocalPads(own)).open()


async def test_scales_that_change_in_place() -> None:
    """The codes of int8 stay the same."""
    model = model_in("LlamaForCausalLM", FORMATS["bitsandbytes int8"])
    own = copy.deepcopy(model)
    async with executors(model, "local-pads") as (one,), one.client(privacy=LocalPads(own)) as client:
        await client.forward(input_ids=IDS)
        own.model.layers[1].mlp.up_proj.state.SCB.mul_(2)
        with pytest.raises(PrivacyError, match="up_proj of the tenant's model was changed"):
            await one.client(privacy=LocalPads(own)).open()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_a_copy_with_hooks(architecture: str) -> None:
    """The executor's layer has none, so hooks of the tenant's own must not matter."""
    model = tiny_model(architecture)
    own = copy.deepcopy(model)
    for module in own.modules():
        module.register_forward_pre_hook(lambda module, arguments: None)
    async with executors(model, "local-pads") as (one,):
        async with one.client() as client:
            expected = (await client.forward(input_ids=IDS)).logits
        async with one.client(privacy=scheme("local-pads", own)) as client:
            torch.testing.assert_close((await client.forward(input_ids=IDS)).logits, expected, rtol=0, atol=1e-4)


async def test_a_copy_whose_format_needs_a_library_that_is_missing(
    base: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(path: Any, dtype: torch.dtype) -> Any:
        raise ImportError("Using bitsandbytes 8-bit quantization requires bitsandbytes")

    monkeypatch.setattr("symbiosis.privacy.own_weights.load_model", load)
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(PrivacyError, match=r"no model could be loaded from .* requires bitsandbytes"):
            await executor.client(privacy=LocalPads(tmp_path)).open()


# Preparation ahead of time.


async def test_precomputed_pools_request_no_more_effects(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        with Wiretap(executor) as tap:
            async with executor.client(lora(), privacy=NoisePool(size=8)) as client:
                await client.precompute()
                before = len([seen for seen in tap.seen if seen.key.pass_ is Pass.FORWARD_WITHOUT_BIAS])
                backward = {seen.key for seen in tap.seen if seen.key.pass_ is Pass.BACKWARD}
                assert len(backward) == len(executor.layers)
                await client.train_step(BATCH, adamw(client.model))
                await client.generate(input_ids=IDS, max_new_tokens=3)
            after = len([seen for seen in tap.seen if seen.key.pass_ is Pass.FORWARD_WITHOUT_BIAS])
            assert before == after > 0
            noise = [seen for seen in tap.seen if seen.key.pass_ is Pass.BACKWARD and seen.tensors[0].shape[0] == 8]
            assert len(noise) == len(executor.layers)
        async with executor.client(lora()) as client:
            await client.precompute()  # has no effect


async def test_precomputed_pads_are_ready(base: Any) -> None:
    """Enough pads are ready for a training step and a text."""
    privacy = LocalPads(base, rows=20, when_out="error")
    async with symbiosis.Executor(base) as executor:
        async with executor.client(lora(), privacy=privacy) as client:
            with pytest.raises(PrivacyError, match="nothing was sent"):
                await client.forward(input_ids=IDS)
        with Wiretap(executor) as tap:
            async with executor.client(lora(), privacy=privacy) as client:
                await client.precompute()
                assert not tap.seen
                await client.train_step(BATCH, adamw(client.model))
                await client.precompute(training=False)
                await client.forward(input_ids=IDS)


async def test_weights_are_loaded_off_the_loop(base: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = []

    def load(path: Any, dtype: torch.dtype) -> Any:
        threads.append(threading.get_ident())
        return copy.deepcopy(base)

    monkeypatch.setattr("symbiosis.privacy.own_weights.load_model", load)
    async with symbiosis.Executor(base) as executor:
        async with executor.client(privacy=LocalPads(tmp_path)), executor.client(privacy=LocalPads(tmp_path)):
            pass
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_masks_are_closed_off_the_loop(base: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client is closed when its folder is free."""
    close, times = Pads.close, [time.monotonic()]

    def close_slowly(mask: Pads) -> None:
        time.sleep(0.3)
        close(mask)

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            times.append(time.monotonic())

    monkeypatch.setattr(Pads, "close", close_slowly)
    scheme = LocalPads(base, folder=tmp_path / "pads")
    async with symbiosis.Executor(base) as executor:
        client = await executor.client(privacy=scheme).open()
        ticks = asyncio.create_task(tick())
        times[:] = [time.monotonic()]
        await client.close()
        ticks.cancel()
        monkeypatch.undo()
        await (await executor.client(privacy=scheme).open()).close()
    assert times[-1] - times[0] > 0.25
    assert len(times) > 3


# A model that changes after it was given to a scheme.


def changed_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)


def merged(model: Any) -> None:
    """Merge an adapter into the weights in place."""
    config = LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    get_peft_model(model, config).merge_adapter()  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [changed_in_place, merged])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["local-pads", "wrapped-shares"])
async def test_a_model_that_is_changed_in_place(name: str, dtype: torch.dtype, change: Callable[[Any], None]) -> None:
    """Results of pads that were ready are right. Later requests and clients get an error that names the layer."""
    model = tiny_model("llama", dtype=dtype)
    own = copy.deepcopy(model)
    job = Job(steps=0, new_tokens=0)
    expected = run_job_plain(model, None, job)
    tolerance = LOGITS if dtype is torch.float32 else 2.0**-6
    async with executors(model, name) as (one, *_):
        async with one.client(privacy=scheme(name, own)) as client:
            assert Comparison.of(await run_job(client, job), expected).worst() <= tolerance
            change(own)

            async def continue_until_error() -> None:
                for _ in range(20):
                    assert Comparison.of(await run_job(client, job), expected).worst() <= tolerance

            with pytest.raises(PrivacyError, match=r"0\.mlp\.up_proj of .* was changed .* would be wrong.*deepcopy"):
                await continue_until_error()
            if name == "local-pads":
                with pytest.raises(PrivacyError, match="no more pads") as after:
                    await run_job(client, job)
                assert "up_proj of the tenant's model was changed" in str(after.value.__cause__)
            with pytest.raises(PrivacyError, match="up_proj of the tenant's model was changed"):
                await one.client(privacy=scheme(name, own)).open()
        with pytest.raises(PrivacyError, match="other weights"):  # no client keeps the weights in memory any more
            await one.client(privacy=scheme(name, own)).open()


@pytest.mark.parametrize("name", ["local-pads", "wrapped-shares"])
async def test_a_parameter_that_gets_another_tensor(name: str) -> None:
    """The scheme keeps the first tensor, and results stay right."""
    model = tiny_model("llama")
    own = copy.deepcopy(model)
    job = Job(steps=0, new_tokens=0)
    expected = run_job_plain(model, None, job)
    async with executors(model, name) as (one, *_), one.client(privacy=scheme(name, own)) as client:
        weight = own.model.layers[0].mlp.up_proj.weight
        weight.data = 2 * weight.data
        for _ in range(4):
            assert Comparison.of(await run_job(client, job), expected).worst() <= LOGITS
        async with one.client(privacy=scheme(name, own)) as further:
            assert Comparison.of(await run_job(further, job), expected).worst() <= LOGITS


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (3, 4096), (1024, 1024), (96, 7)])
def test_samples_cover_all_rows_and_columns(shape: tuple[int, int]) -> None:
    """Samples include every row and column of small weights, and every sixteenth of them of larger weights."""
    for values in (torch.randn(shape), torch.randn(shape[::-1]).t()):
        weight = _PlainWeight("layer", values, transposed=True)
        weight.check()
        for axis, size in enumerate(shape):
            for part in range(min(size, 16)):
                some = values.unflatten(axis, (-1, size // 16)) if size % 16 == 0 else values.unsqueeze(axis + 1)
                changed = some.select(axis, part)
                before = changed.clone()
                changed.mul_(2)
                with pytest.raises(PrivacyError, match="layer of the tenant's model was changed"):
                    weight.check()
                changed.copy_(before)
        weight.check()
    values[:] = math.nan
    _PlainWeight("layer", values, transposed=True).check()


# Interruptions.


@ALL
async def test_a_masked_client_continues_after_a_cancelled_operation(name: str) -> None:
    model = tiny_model("llama")
    job = Job(steps=0, new_tokens=0)
    expected = run_job_plain(model, None, job)
    async with executors(model, name) as (one, *_), one.client(privacy=scheme(name, model)) as client:
        for delay in (0.0, 0.001, 0.005):
            task = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=40, min_new_tokens=40))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        client.model.model.norm.weight.requires_grad_(True)
        task = asyncio.create_task(client.train_step(BATCH, torch.optim.SGD(client.model.parameters(), lr=0.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert Comparison.of(await run_job(client, job), expected).worst() <= LOGITS
        assert client._channel._sent == {}  # type: ignore[union-attr]


@ALL
async def test_masked_clients_end_with_their_executor(name: str) -> None:
    model = tiny_model("llama")
    async with executors(model, name) as (one, *_):
        client = await one.client(privacy=scheme(name, model)).open()
        task = asyncio.create_task(client.generate(input_ids=IDS, max_new_tokens=50, min_new_tokens=50))
        await asyncio.sleep(0.01)
        await one.close()
        with pytest.raises(symbiosis.errors.PeerError):
            await asyncio.wait_for(task, 20)
        await client.close()


async def test_a_client_that_cannot_be_masked_does_not_join(base: Any) -> None:
    async with symbiosis.Executor(base, name="one") as executor:
        for wrong, why in (
            (SecretShares("inproc://nowhere"), "nowhere"),
            (SecretShares("inproc://one"), "own address"),
            (LocalPads(tiny_model(seed=1)), "other weights"),
        ):
            with pytest.raises(symbiosis.errors.SymbiosisError, match=why):
                await executor.client(privacy=wrong).open()
        assert executor.status()["clients"] == []
        async with symbiosis.Executor(tiny_model(seed=1), name="two"):
            with pytest.raises(PrivacyError, match="different base models"):
                await executor.client(privacy=SecretShares("inproc://two")).open()
        listener = await executor.listen("tcp://127.0.0.1:0")
        shares = SecretShares(listener.address)  # two addresses of one executor
        with pytest.raises(PrivacyError, match="lead to the same executor"):
            await executor.client(privacy=shares).open()
        await until(lambda: executor.status()["clients"] == [])
