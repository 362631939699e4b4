"""Quantized base models: what plain transformers + PEFT computes on the same quantized model, with shared weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM, TorchAoConfig

import symbiosis
from symbiosis.core.requests import Key, Pass
from symbiosis.errors import PlaceholderError, SplitError, UsageError
from symbiosis.executor import quantized
from symbiosis.executor.layers import QuantizedLayer
from symbiosis.executor.quantized import is_quantized, weight_of
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import Comparison, Job, run_job, run_job_plain, tiny_model
from tests.helpers import BATCH, CAUSAL, adamw

JOB = Job(steps=3, new_tokens=4)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def fp8() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def bnb_int8() -> Any:
    return BitsAndBytesConfig(load_in_8bit=True)


def nf4() -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


KINDS: dict[str, tuple[Callable[[], Any], float, float]] = {
    "torchao int8": (int8, 0.0, 0.0),
    "torchao fp8": (fp8, 0.0, 0.0),
    "bitsandbytes int8": (bnb_int8, 0.05, 0.05),
    "bitsandbytes NF4": (nf4, 1e-5, 1e-5),
}
"""How to quantize, and the largest relative differences from plain PEFT, of logits and of gradients. bitsandbytes' int8
computes with rows that are rounded to integers; the executor does not round them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    tiny_model("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def load(checkpoint: Path, kind: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=KINDS[kind][0](), **options)


def plain(checkpoint: Path, kind: str) -> Any:
    """Return the model for plain PEFT. bitsandbytes lays weights out for inference on some CPUs, and then its layers
    give no gradients any more."""
    model = load(checkpoint, kind)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def dequantized(module: Any) -> torch.Tensor:
    return torch.cat([rows for _, rows in weight_of(module).blocks()])


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type=CAUSAL)


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("kind", KINDS)
async def test_plain_pefts_numbers(checkpoint: Path, kind: str, transport: str, tmp_path: Path) -> None:
    expected = run_job_plain(plain(checkpoint, kind), lora(), JOB)
    async with symbiosis.Executor(load(checkpoint, kind)) as executor:
        assert sum(isinstance(layer, QuantizedLayer) for layer in executor.service._split.layers) == 14
        if transport == "inproc":
            async with executor.client(lora(), seed=0) as client:
                found = await run_job(client, JOB)
        else:
            await executor.listen(f"shm://{tmp_path}/s", keep_weights=True)
            async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client(lora(), seed=0) as client:
                found = await run_job(client, JOB)
    comparison = Comparison.of(found, expected)
    _, logits, gradients = KINDS[kind]
    assert comparison.worst("logits") <= logits, comparison
    assert comparison.worst("gradient") <= gradients, comparison
    assert comparison.worst("losses") <= gradients, comparison


ON = {"target_modules": ["q_proj", "down_proj"], "task_type": CAUSAL}
BD = peft.BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
UNLIKE_PLAIN: dict[str, Callable[[], Any]] = {
    "monteclora_config": lambda: LoraConfig(monteclora_config=peft.MontecloraConfig(), **ON),
    "use_bdlora": lambda: LoraConfig(use_bdlora=BD, **ON),
    "UNILORA": lambda: peft.UniLoraConfig(r=4, **ON),
}
"""Methods that plain PEFT leaves out on layers of bitsandbytes, by what the refusal names."""


@pytest.mark.parametrize("kind", ["bitsandbytes NF4", "bitsandbytes int8"])
def test_methods_that_plain_peft_leaves_out(checkpoint: Path, kind: str) -> None:
    """If this fails, plain PEFT has learnt a method, and the refusal of it can go."""
    made = {name: peft.get_peft_model(plain(checkpoint, kind), make()) for name, make in UNLIKE_PLAIN.items()}
    assert not any("monteclora" in name for name, _ in made["monteclora_config"].named_modules())
    assert made["use_bdlora"].get_submodule(f"{LAYER}.lora_A.default").weight.shape == (8, 64)
    scales = made["UNILORA"].get_submodule(LAYER).unilora_scales_A["default"]
    assert not scales.is_floating_point()
    assert not scales.any()


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("method", UNLIKE_PLAIN)
@pytest.mark.parametrize("kind", ["bitsandbytes NF4", "bitsandbytes int8", "torchao int8"])
async def test_they_are_refused(checkpoint: Path, kind: str, method: str, transport: str, tmp_path: Path) -> None:
    """They are refused on layers of bitsandbytes, and equal plain PEFT on those of torchao, which the error names."""
    async with symbiosis.Executor(load(checkpoint, kind)) as executor:
        await executor.listen(f"shm://{tmp_path}/s", keep_weights=True)

        async def found(make: Any) -> Any:
            async with make(UNLIKE_PLAIN[method](), seed=0) as client:
                return await run_job(client, JOB)

        async with symbiosis.connect(f"shm://{tmp_path}/s") as base:
            make = executor.client if transport == "inproc" else base.client
            if kind != "torchao int8":
                with pytest.raises(UsageError, match=rf"plain PEFT .*{method}.*bitsandbytes.*use plain LoRA"):
                    await found(make)
                return
            outcome = await found(make)
    assert Comparison.of(outcome, run_job_plain(plain(checkpoint, kind), UNLIKE_PLAIN[method](), JOB)).bit_equal


async def test_a_method_that_writes_to_a_result(checkpoint: Path) -> None:
    """aLoRA adds to the base layer's result in place; in the executor's process that is what the executor computed."""
    wanted = LoraConfig(r=4, init_lora_weights=False, alora_invocation_tokens=[5], **ON)
    expected = run_job_plain(plain(checkpoint, "torchao int8"), wanted, JOB)
    async with (
        symbiosis.Executor(load(checkpoint, "torchao int8")) as executor,
        executor.client(wanted, seed=0) as client,
    ):
        assert Comparison.of(await run_job(client, JOB), expected).bit_equal


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_shared_in_their_small_form(checkpoint: Path, kind: str) -> None:
    executor = symbiosis.Executor(load(checkpoint, kind))
    whole = symbiosis.Executor(AutoModelForCausalLM.from_pretrained(checkpoint)).sharing
    assert executor.sharing.held == whole.held
    assert not executor.sharing.unserved
    assert executor.sharing.served < 0.5 * whole.served


@pytest.mark.parametrize("kind", KINDS)
def test_passes_in_fp32(checkpoint: Path, kind: str) -> None:
    """For masked rows: products with the dequantized weight."""
    layer = next(layer for layer in SplitModel(load(checkpoint, kind)).layers if isinstance(layer, QuantizedLayer))
    x = torch.randn(3, 64)
    weight = dequantized(layer.module).double()
    with torch.no_grad():
        (y,) = layer.run(Key((0,), Pass.FORWARD_WITHOUT_BIAS, fp32=True), (x,))
        (dx,) = layer.run(Key((0,), Pass.BACKWARD, fp32=True), (x,))
        (norms,) = layer.run(Key((0,), Pass.NORMS, fp32=True), (x,))
    torch.testing.assert_close(y.double(), x.double() @ weight.t(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx.double(), x.double() @ weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms.double(), weight.norm(dim=1).expand(3, -1), rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest floating-point matrix that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.is_floating_point() and func is not torch.ops.aten.detach.default:
            self.elements = max(self.elements, out.numel())
        return out


OF_NF4 = {"bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_storage": torch.bfloat16}
"""Options of NF4: scales that are quantized too, and numbers that are stored in another dtype than bytes."""


@pytest.mark.parametrize("bits", ["narrow", "fp32"])
@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), *(("bitsandbytes NF4", options) for options in OF_NF4)]
)
def test_no_more_than_a_block_is_dequantized_at_a_time(
    kind: str, options: dict[str, Any], bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward passes and passes in fp32 of a layer of 320 x 64 in blocks of 64 outputs equal those in one piece."""
    tiny_model("llama", hidden_size=64, intermediate_size=320).save_pretrained(tmp_path)
    config = KINDS[kind][0]()
    for name, value in options.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    layer = next(layer for layer in SplitModel(model).layers if layer.spec.name.endswith("up_proj"))
    x, dy = torch.randn(3, 64), torch.randn(3, 320)
    fp32 = bits == "fp32"
    keys = {Pass.BACKWARD: dy} | ({Pass.FORWARD: x, Pass.NORMS: x} if fp32 else {})

    def results() -> tuple[list[torch.Tensor], int]:
        layer._norms = None
        with torch.no_grad(), Largest() as seen:
            return [layer.run(Key((0,), key, fp32=fp32), (rows,))[0] for key, rows in keys.items()], seen.elements

    whole, elements = results()
    assert elements == 320 * 64
    monkeypatch.setattr(quantized, "BLOCK", 64 * 64)
    parts, elements = results()
    assert elements == 64 * 64
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_quantized_weight_is_not_trained(checkpoint: Path, kind: str) -> None:
    async with symbiosis.Executor(load(checkpoint, kind)) as executor, executor.client() as client:
        with pytest.raises(PlaceholderError, match=r"q_proj: its weight is quantized"):
            client.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)


def test_rows_do_not_depend_on_one_another(checkpoint: Path) -> None:
    """bitsandbytes itself treats a column apart if any row of the batch has a large number there."""
    layer = next(
        layer for layer in SplitModel(load(checkpoint, "bitsandbytes int8")).layers if isinstance(layer, QuantizedLayer)
    )
    x = torch.randn(2, 64)
    beside = torch.cat([x[:1], x[1:] * 1000])
    key = Key((0,), Pass.FORWARD)
    with torch.no_grad():
        torch.testing.assert_close(
            layer.run(key, (beside,))[0][0], layer.run(key, (x[:1],))[0][0], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bias_of_ones_own(kind: str, tmp_path: Path) -> None:
    """The base layer leaves its own bias out before it rounds."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=50.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    quantized_model = load(tmp_path, kind, dtype=torch.bfloat16)
    layer = SplitModel(quantized_model).layers[0]
    assert isinstance(layer, QuantizedLayer)
    assert layer.spec.bias
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        (y,) = layer.run(Key((0,), Pass.FORWARD_WITHOUT_BIAS), (x,))
    wanted = x.float() @ dequantized(layer.module).float().t()
    assert (y.float() - wanted).abs().max() <= 0.02 * wanted.abs().max()


async def test_a_trained_bias_beside_products_in_fp32(tmp_path: Path) -> None:
    """Linear4bit keeps its bias in the dtype that it computes in. Its results have that of the model."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    config = LoraConfig(task_type=CAUSAL, r=4, target_modules=["q_proj"], bias="lora_only")
    torch.manual_seed(0)
    tuned = get_peft_model(plain(tmp_path, "bitsandbytes NF4"), copy.deepcopy(config)).train()
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    expected = []
    for _ in range(3):
        loss = tuned(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    async with symbiosis.Executor(load(tmp_path, "bitsandbytes NF4")) as executor:
        async with executor.client(config, seed=0) as client:
            optimizer = torch.optim.SGD([p for p in client.model.parameters() if p.requires_grad], lr=1.0)
            found = [await client.train_step(BATCH, optimizer) for _ in range(3)]
    assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_quantized_weight_cannot_be_allowed_to_leave(checkpoint: Path) -> None:
    with pytest.raises(SplitError, match=r"q_proj' matches no linear base layer with a plain weight"):
        symbiosis.Executor(load(checkpoint, "torchao int8"), allow_weights=["*.q_proj"])


def test_weights_in_fp8_without_a_library_are_refused(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.config.quantization_config = {"quant_method": "someone's fp8"}
    model.model.layers[0].mlp.up_proj.to(torch.float8_e4m3fn)
    with pytest.raises(SplitError, match=r"up_proj \(Linear\) has quantized weights that cannot be served"):
        symbiosis.Executor(model)


def test_quantized_layers_that_no_pattern_names_are_told_as_such(checkpoint: Path) -> None:
    with pytest.raises(SplitError, match=r"which clients cannot hold: name all such layers in base_layers"):
        symbiosis.Executor(load(checkpoint, "torchao int8"), base_layers=["*.q_proj"])


class Codes(nn.Module):
    """A layer of a quantization that nothing here knows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))


def test_an_unknown_quantization_is_refused_by_name(checkpoint: Path) -> None:
    model = copy.deepcopy(load(checkpoint, "torchao int8"))
    model.model.layers[0].mlp.extra = Codes()
    with pytest.raises(SplitError, match=r"mlp\.extra \(Codes\) has quantized weights that cannot be served.*NF4"):
        symbiosis.Executor(model)


async def test_torchaos_int4_trains_where_plain_peft_cannot(checkpoint: Path) -> None:
    """Its products have no derivative, so losses are those of a plain model with the dequantized weights."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32))
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, module in plain.named_modules():
        quantized = model.get_submodule(name)
        if is_quantized(quantized):
            module.weight.data = dequantized(quantized).clone()
    torch.manual_seed(0)
    adapted = get_peft_model(plain, lora()).train()
    optimizer = adamw(adapted)
    expected = []
    for _ in range(3):
        loss = adapted(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    async with symbiosis.Executor(model) as executor, executor.client(lora(), seed=0) as client:
        assert executor.sharing.served > 0
        optimizer = adamw(client.model)
        assert [await client.train_step(BATCH, optimizer) for _ in range(3)] == pytest.approx(expected, rel=1e-5)


def test_what_is_quantized() -> None:
    assert not is_quantized(nn.Linear(4, 4))
    assert not is_quantized(nn.Embedding(4, 4))


def test_a_device_may_be_named_and_no_other_precision(checkpoint: Path) -> None:
    assert symbiosis.Executor(load(checkpoint, "bitsandbytes NF4"), device="cpu").layers
    with pytest.raises(UsageError, match=r"dtype is torch.float16, but the model cannot be converted"):
        symbiosis.Executor(load(checkpoint, "bitsandbytes NF4"), dtype="float16")


def test_rows_do_not_have_the_precision_of_what_stays_in_fp32(checkpoint: Path) -> None:
    """As in BLIP-2, whose first parameter does."""
    model = load(checkpoint, "bitsandbytes int8", dtype=torch.float16)
    model.register_parameter("queries", torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False))
    model._keep_in_fp32_modules = {"queries"}
    assert next(model.parameters()).dtype is torch.float32
    assert {spec.dtype for spec in symbiosis.Executor(model).layers} == {torch.float16}
