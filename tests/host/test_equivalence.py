"""Results equal those of plain transformers + PEFT: logits, generated tokens, gradients and trained adapters.

A client alone is bit-equal in fp32. Among others, a matrix product of another number of rows may be blocked in another
way; ``helpers.py`` has the tolerances. Generated tokens are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.testing import ARCHITECTURES, Comparison, Job, Outcome, compare, run_job, run_job_plain, tiny_model
from tests.helpers import BATCH, CAUSAL, GRADIENTS, IDS, METHODS, TRAINED, adamw, assert_close, crowd, ia3, lora, prefix


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_alone_bit_equal(architecture: str, method: str | None, base_layers: str) -> None:
    config = METHODS[method](architecture) if method else None
    model = tiny_model(architecture)
    comparison = await compare(model, config, base_layers=base_layers)
    assert comparison.bit_equal, comparison
    names = set(comparison.differences)
    assert {"logits", "greedy", "sampled"} <= names
    if config is not None:
        assert "losses" in names
        assert (
            sum(name.startswith("gradient") for name in names) == sum(name.startswith("adapter") for name in names) > 0
        )


@pytest.mark.parametrize("base_layers", ["linear", pytest.param("mlp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_among_seven_others(architecture: str, base_layers: str) -> None:
    """Three tenants are compared, with LoRA, IA3 and prefix tuning. Each of them runs beside the other two and five
    more.
    """
    model = tiny_model(architecture)
    configs = [make(architecture) for make in METHODS.values()]
    expected = [run_job_plain(model, config, seed=seed) for seed, config in enumerate(configs)]
    others = [
        (lora(architecture), "train"),
        (ia3(architecture), "train"),
        (prefix(architecture), "generate"),
        (lora(architecture), "generate"),
        (None, "generate"),
    ]

    async def watched(seed: int, config: Any) -> Outcome:
        async with executor.client(copy.deepcopy(config), seed=seed) as client:
            return await run_job(client)

    async with symbiosis.Executor(model, base_layers=base_layers) as executor, crowd(executor, others):
        outcomes = await asyncio.gather(*[watched(seed, config) for seed, config in enumerate(configs)])
    assert executor.statistics().mean_batch > 1.2  # batches had several clients
    for outcome, plain in zip(outcomes, expected, strict=True):
        assert_close(outcome, plain)


@pytest.mark.parametrize(
    "policy", ["no-lockstep", "lockstep", "opportunistic:wait_ms=0", "co-serving:slo_ms=20,max_wait_ms=50"]
)
async def test_among_others_under_every_policy(policy: str) -> None:
    model = tiny_model()
    expected = run_job_plain(model, lora(), seed=3)
    others = [(ia3(), "train"), (None, "generate"), (prefix(), "generate")]
    async with symbiosis.Executor(model, policy=policy) as executor, crowd(executor, others):
        async with executor.client(lora(), seed=3) as client:
            assert_close(await run_job(client), expected)


@pytest.mark.parametrize("others", [[], [(lora(), "train"), (None, "generate")]], ids=["alone", "beside-others"])
async def test_requests_in_slices(others: list[Any]) -> None:
    """Batches have at most 4 rows, so every training request (18 rows) is served in slices."""
    model = tiny_model()
    expected = run_job_plain(model, lora(), seed=3)
    async with symbiosis.Executor(model, max_rows=4) as executor, crowd(executor, others):
        async with executor.client(lora(), seed=3) as client:
            assert_close(await run_job(client), expected)
    statistics = executor.statistics()
    assert statistics.members > statistics.requests


def checkpointing(use_reentrant: bool) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()

    return prepare


def unfreeze(*fragments: str) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        chosen = [p for name, p in model.named_parameters() if any(fragment in name for fragment in fragments)]
        assert chosen
        for parameter in chosen:
            parameter.requires_grad_(True)

    return prepare


def unfreeze_by_attribute(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "input_layernorm" in name:
            parameter.requires_grad = True


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None]] = {
    "checkpointing": ({}, checkpointing(use_reentrant=False)),
    "checkpointing-reentrant": ({}, checkpointing(use_reentrant=True)),
    "modules-to-save-lm-head": ({"modules_to_save": ["lm_head"]}, None),
    "modules-to-save-embedding": ({"modules_to_save": ["embed_tokens"]}, None),
    "modules-to-save-norm": ({"modules_to_save": ["input_layernorm"]}, None),
    "modules-to-save-base-layer": ({"target_modules": ["q_proj"], "modules_to_save": ["gate_proj"]}, None),
    "modules-to-save-mlp": ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, None),
    "norms": ({}, unfreeze("layernorm", "model.norm")),
    "norms-by-attribute": ({}, unfreeze_by_attribute),
    "base-weight": ({"target_modules": ["q_proj"]}, unfreeze("0.self_attn.k_proj.weight")),
    "lora-on-lm-head": ({"target_modules": ["q_proj", "lm_head"]}, None),
    "lora-on-embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, None),
    "rank-pattern": (
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}, "layers_to_transform": [1]},
        None,
    ),
    "trainable-tokens": ({"trainable_token_indices": [3, 4, 5]}, None),
}
"""LoRA options, and changes of the model after it was made."""
TIED = {name for name in VARIANTS if name.endswith(("lm-head", "embedding", "tokens"))}
"""Variants of the weight that embeddings and head of a model may have in common."""


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("variant", "tied"), [*((name, False) for name in VARIANTS), *((name, True) for name in VARIANTS if name in TIED)]
)
async def test_variants(variant: str, tied: bool) -> None:
    """Tenants change more than their adapter: results are bit-equal alone, and close to plain PEFT among others."""
    options, prepare = VARIANTS[variant]
    model = tiny_model(tie_word_embeddings=tied)
    job = Job(prepare=prepare, steps=6)
    expected = run_job_plain(model, lora(**options), job, seed=5)
    others = [(lora(), "train"), (None, "generate")]
    async with symbiosis.Executor(model) as executor:
        async with executor.client(lora(**options), seed=5) as client:
            alone = Comparison.of(await run_job(client, job), expected)
        assert alone.bit_equal, alone
        async with crowd(executor, others), executor.client(lora(**options), seed=5) as client:
            assert_close(await run_job(client, job), expected)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_bigcode"])
async def test_trainable_biases(architecture: str, bias: str) -> None:
    """The tenant has biases of Conv1D and Linear of its own, which the executor must then omit."""
    model = tiny_model(architecture)
    comparison = await compare(model, lora(architecture, bias=bias), seed=5)
    assert comparison.worst() <= TRAINED, comparison
    assert comparison.worst("gradient") <= GRADIENTS, comparison
    assert any(name.endswith("bias") for name in comparison.differences if name.startswith("adapter"))


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("target", [["q_proj", "v_proj"], ["gate_proj"], ["q_proj", "down_proj"]], ids="+".join)
async def test_partly_adapted(target: list[str], base_layers: str) -> None:
    """An MLP is served whole to a tenant without an adapter inside it, and layer by layer to a tenant with one."""
    model = tiny_model()
    comparison = await compare(model, lora(target_modules=target), base_layers=base_layers)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize(
    "base_layers", ["*.q_proj", ["*.mlp"], ["model.layers.0.*_proj", "lm_head"], ["lm_head"]], ids=str
)
async def test_chosen_base_layers(base_layers: Any) -> None:
    comparison = await compare(tiny_model(), lora(target_modules=["q_proj", "v_proj"]), base_layers=base_layers)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("method", [*METHODS, None])
async def test_bf16_model(method: str | None, base_layers: str) -> None:
    """A client alone is bit-equal in bf16 too."""
    config = METHODS[method]() if method else None
    comparison = await compare(tiny_model(dtype=torch.bfloat16), config, base_layers=base_layers)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize("method", METHODS)
async def test_bf16_model_among_others(method: str) -> None:
    """bf16 has 8 bits of mantissa, so a sum in another order may round to the next number."""
    model = tiny_model(dtype=torch.bfloat16)
    config = METHODS[method]()
    job = Job(steps=4)
    expected = run_job_plain(model, config, job, seed=5)
    async with symbiosis.Executor(model) as executor, crowd(executor, [(lora(), "train"), (None, "generate")]):
        async with executor.client(config, seed=5) as client:
            comparison = Comparison.of(await run_job(client, job), expected)
    assert comparison.worst("logits") <= 0.02, comparison
    assert comparison.worst("gradient") <= 0.05, comparison
    assert comparison.worst("losses") <= 0.02, comparison


@pytest.mark.parametrize("method", METHODS)
async def test_autocast(method: str) -> None:
    """With bf16 autocast over a model in fp32, base layers run in fp32 here and in bf16 in plain PEFT: results are
    close.
    """

    def autocast(model: Any) -> None:
        forward = model.forward

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(*args, **kwargs)

        model.forward = under_autocast

    comparison = await compare(tiny_model(), METHODS[method](), Job(prepare=autocast, new_tokens=0, steps=4))
    assert comparison.worst("logits") <= 0.03, comparison
    assert comparison.worst("gradient") <= 0.06, comparison
    assert comparison.worst("losses") <= 0.01, comparison
    assert comparison.worst("logits") > 1e-5  # autocast was on


async def test_dtype_option(base: Any) -> None:
    """Executor(dtype=...) serves the model in that precision."""
    expected = run_job_plain(copy.deepcopy(base).to(torch.bfloat16), lora(), Job(steps=2))
    async with symbiosis.Executor(base, dtype=torch.bfloat16) as executor, executor.client(lora(), seed=0) as client:
        assert (await client.forward(input_ids=IDS)).logits.dtype is torch.bfloat16
        client.manual_seed(0)
    async with symbiosis.Executor(base, dtype=torch.bfloat16) as executor, executor.client(lora(), seed=0) as client:
        assert Comparison.of(await run_job(client, Job(steps=2)), expected).bit_equal


async def test_dropout_streams_among_others() -> None:
    """Dropout runs in LoRA, in GPT-2 itself, and in recomputed blocks. Every tenant draws from its own stream."""
    model = tiny_model("gpt2")
    jobs = [
        Job(seed=1, steps=8, prepare=checkpointing(use_reentrant=False)),
        Job(seed=2, steps=8),
        Job(seed=3, steps=8, prepare=checkpointing(use_reentrant=False)),
    ]
    config = lora("gpt2", lora_dropout=0.5)
    expected = [run_job_plain(model, config, job, seed=seed) for seed, job in enumerate(jobs)]

    async def watched(seed: int, job: Job) -> Outcome:
        async with executor.client(copy.deepcopy(config), seed=seed) as client:
            return await run_job(client, job)

    async with symbiosis.Executor(model) as executor:
        outcomes = await asyncio.gather(*[watched(seed, job) for seed, job in enumerate(jobs)])
    for outcome, plain in zip(outcomes, expected, strict=True):
        assert_close(outcome, plain)


async def test_a_seed_works_as_in_torch(base: Any) -> None:
    """client(seed=s) starts like torch.manual_seed(s) and get_peft_model. A client without a seed continues torch's
    stream.
    """
    async with symbiosis.Executor(base) as executor:
        torch.manual_seed(11)
        plain = get_peft_model(copy.deepcopy(base), lora()).state_dict()
        before = torch.get_rng_state()
        async with executor.client(lora(), seed=11) as seeded:
            assert torch.equal(torch.get_rng_state(), before)
            torch.manual_seed(11)
            async with executor.client(lora()) as unseeded:
                for client in (seeded, unseeded):
                    state = client.model.state_dict()
                    for name in (name for name in plain if "lora" in name):
                        assert torch.equal(state[name], plain[name]), name


async def test_custom_code(base: Any) -> None:
    """run(fn) runs any synchronous code of the model: here the tenant's own decoder, and hidden states."""

    def decode(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = None
        step = ids
        with torch.no_grad():
            for _ in range(4):
                output = model(input_ids=step, past_key_values=cache, use_cache=True, output_hidden_states=True)
                cache = output.past_key_values
                step = output.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, step], 1)
        return ids, output.hidden_states[-1]

    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(base), lora()).eval()
    expected = decode(plain, IDS)
    async with symbiosis.Executor(base) as executor, executor.client(lora(), seed=0) as client:
        for got, wanted in zip(await client.run(decode, client.model, IDS), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("how", ["beams", "beam-sampling", "contrastive-length", "left-padded", "scores", "num-return"])
async def test_generation_options(base: Any, how: str) -> None:
    """Options of transformers' generate work as without Symbiosis."""
    options: dict[str, Any] = {
        "beams": {"num_beams": 3},
        "beam-sampling": {"num_beams": 2, "do_sample": True, "top_p": 0.9},
        "contrastive-length": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        "left-padded": {},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
        "num-return": {"do_sample": True, "num_return_sequences": 3},
    }[how]
    mask = torch.ones_like(IDS)
    if how == "left-padded":
        mask[0, :3] = 0
    arguments = {"input_ids": IDS, "attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, **options}
    torch.manual_seed(4)
    plain = get_peft_model(copy.deepcopy(base), lora()).eval()
    torch.manual_seed(8)
    expected = plain.generate(**arguments)
    async with symbiosis.Executor(base) as executor, executor.client(lora(), seed=4) as client:
        client.manual_seed(8)
        got = await client.generate(**arguments)
    if how == "scores":
        # The last row of a prefill is a slice, which plain nn.Linear multiplies with another kernel: 1 ulp.
        torch.testing.assert_close(got.scores, expected.scores, rtol=0, atol=1e-6)
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)


async def test_parameters_that_a_tenant_unfreezes_stay_its_own(base: Any) -> None:
    """A tenant trains norms, embedding, lm_head and biases, and the logits of another tenant stay bit-equal."""
    gpt = tiny_model("gpt2")
    for model, architecture, options in (
        (base, "llama", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
        (gpt, "gpt2", {"bias": "all", "modules_to_save": ["ln_f"]}),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        async with (
            symbiosis.Executor(model) as executor,
            executor.client(lora(architecture), seed=1) as neighbour,
            executor.client(lora(architecture, **options), seed=2) as trainer,
        ):
            for name, parameter in trainer.model.named_parameters():
                if "ln_1" in name or "input_layernorm" in name:
                    parameter.requires_grad_(True)
            quiet = (await neighbour.forward(input_ids=IDS)).logits
            own = (await trainer.forward(input_ids=IDS)).logits
            optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], lr=0.1)
            for _ in range(3):
                await trainer.train_step({"input_ids": IDS, "labels": IDS}, optimizer)
            trainer.model.eval()
            assert not torch.allclose((await trainer.forward(input_ids=IDS)).logits, own, atol=0.1)
            assert torch.equal((await neighbour.forward(input_ids=IDS)).logits, quiet)
            async with executor.client(lora(architecture), seed=1) as newcomer:
                assert torch.equal((await newcomer.forward(input_ids=IDS)).logits, quiet)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


async def test_adapters_can_be_exchanged_with_plain_peft(base: Any, tmp_path: Any) -> None:
    """A client saves adapters that plain PEFT loads, and the other way round, with equal logits."""
    from peft import PeftModel

    for method, make in METHODS.items():
        folder = tmp_path / method
        async with symbiosis.Executor(copy.deepcopy(base)) as executor:
            async with executor.client(make(), seed=9) as client:
                optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad], lr=1e-2)
                for _ in range(3):
                    await client.train_step({"input_ids": IDS, "labels": IDS}, optimizer)
                client.model.eval()
                trained = (await client.forward(input_ids=IDS)).logits.detach()
                client.save_adapter(folder)
            loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
            assert torch.equal(loaded(input_ids=IDS).logits, trained), method
            loaded.save_pretrained(str(folder / "again"))
            async with executor.client() as client:
                client.load_adapter(folder / "again")
                assert torch.equal((await client.forward(input_ids=IDS)).logits, trained), method
                assert not any(p.requires_grad for p in client.model.parameters())
            async with executor.client(make(), seed=10) as client:
                trainable = method != "prefix"  # PEFT loads prompts for inference only
                client.load_adapter(folder / "again", name="second", trainable=trainable)
                assert torch.equal((await client.forward(input_ids=IDS)).logits, trained), method
                if trainable:
                    await client.train_step(BATCH, adamw(client.model, lr=0.1))
                    client.model.eval()
                    assert not torch.equal((await client.forward(input_ids=IDS)).logits, trained)


async def test_several_adapters_in_one_client(base: Any) -> None:
    """PEFT's calls for several adapters, such as add, set and disable, work on a client's model."""
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(base), lora())
    plain.add_adapter("other", lora(r=2))
    plain.eval()

    def logits(model: Any, how: str) -> torch.Tensor:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if how == "disabled":
                stack.enter_context(model.disable_adapter())
            else:
                model.set_adapter(how)
            output: torch.Tensor = model(input_ids=IDS).logits
        return output

    async with symbiosis.Executor(base) as executor, executor.client(lora(), seed=0) as client:
        await client.run(client.model.add_adapter, "other", lora(r=2))
        client.model.eval()
        for how in ("default", "other", "disabled"):
            assert torch.equal(await client.run(logits, client.model, how), logits(plain, how)), how


async def test_a_batch_of_several_adapters(base: Any) -> None:
    """With adapter_names, each sequence of a batch has another adapter."""
    config = LoraConfig(task_type=CAUSAL, r=4, init_lora_weights=False)
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(base), config)
    plain.add_adapter("other", config)
    plain.eval()
    arguments = {"input_ids": IDS, "adapter_names": ["default", "other"]}
    async with symbiosis.Executor(base) as executor, executor.client(config, seed=0) as client:
        await client.run(client.model.add_adapter, "other", config)
        client.model.eval()
        assert torch.equal((await client.forward(**arguments)).logits, plain(**arguments).logits)


class TestTheComparisonItself:
    """The comparison must detect differences: otherwise it would prove nothing."""

    def test_another_seed_is_detected(self) -> None:
        model = tiny_model()
        one, two = (run_job_plain(model, lora(), Job(steps=2), seed=seed) for seed in (0, 1))
        comparison = Comparison.of(one, two)
        assert not comparison.bit_equal
        assert comparison.worst("logits") > 0.01
        assert comparison.worst("adapter") > 0.01

    def test_another_adapter_is_detected(self) -> None:
        model = tiny_model()
        plain = run_job_plain(model, None)
        for make in METHODS.values():
            adapted = run_job_plain(model, make(), Job(steps=0))
            assert Comparison.of(adapted, plain).worst("logits") > 1e-3

    def test_missing_and_infinite_values_are_detected(self) -> None:
        outcome = Outcome(logits=torch.ones(2), greedy=torch.ones(1))
        other = Outcome(logits=torch.tensor([1.0, float("nan")]))
        comparison = Comparison.of(outcome, other)
        assert comparison.differences == {"logits": float("inf"), "greedy": float("inf")}
        assert not comparison.bit_equal

    async def test_swapped_rows_are_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If split gave rows to the wrong tenant, the test among others would fail."""
        from symbiosis.executor import runner

        split = runner.split
        monkeypatch.setattr(
            runner,
            "split",
            lambda rows, counts: split(rows.flip(0), counts) if len(counts) > 1 else split(rows, counts),
        )
        model = tiny_model()
        expected = run_job_plain(model, lora(), Job(steps=2), seed=3)
        async with symbiosis.Executor(model) as executor, crowd(executor, [(lora(), "train"), (None, "generate")]):
            async with executor.client(lora(), seed=3) as client:
                comparison = Comparison.of(await run_job(client, Job(steps=2)), expected)
        assert comparison.worst() > 0.01
