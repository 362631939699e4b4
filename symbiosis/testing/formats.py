"""Number formats of base models that are tried: bf16, and quantized weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from symbiosis.testing.zoo import ZOO, zoo_model


class NumberFormat(NamedTuple):
    """How a model of a format is made, and how close a client must come to plain ``transformers`` + PEFT."""

    dtype: torch.dtype
    quantization: Callable[[], Any] | None
    """Returns a ``quantization_config`` of transformers."""
    computed: float
    """Largest relative difference of logits, gradients and losses."""
    trained: float
    """Largest relative difference of what three AdamW steps change; 1 for a client that trains nothing. Other rounding
    gives up to 1e-4 in fp32 and 0.2 in bf16, because AdamW's first steps are as large for small gradients."""
    tokens: bool = True
    """Whether generated tokens must be the same."""
    note: str = ""
    """What the comparison leaves out, in a sentence."""


FP32 = NumberFormat(torch.float32, None, 1e-5, 1e-2)


def _torchao(name: str, **options: Any) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)(**options))


def _int4() -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=32))


def _bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


_nf4 = partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4")
ROUND_OTHERWISE = ("AdaLoRA", "DEFT", "DoRA", "HRA")
"""Methods that change a layer's weight in plain PEFT, and its rows or results where the weight is served."""


FORMATS: dict[str, NumberFormat] = {
    "bf16": NumberFormat(
        torch.bfloat16,
        None,
        1e-2,
        0.3,
        note=f"{', '.join(ROUND_OTHERWISE)} round in other places than in plain PEFT, which rounds a changed weight: "
        "with these, logits, gradients and losses are within 0.1, and tokens are not compared. They are as close to "
        "fp32 as plain PEFT's.",
    ),
    "torchao int8": FP32._replace(quantization=lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao fp8": FP32._replace(quantization=lambda: _torchao("Float8WeightOnlyConfig")),
    "torchao int4": FP32._replace(quantization=_int4),
    "bitsandbytes NF4": FP32._replace(
        quantization=partial(_nf4, bnb_4bit_compute_dtype=torch.float32),
        note="Both models keep the layout of weights that gives gradients. On a CPU with AVX-512 bf16, a plain model "
        "that only generates gets another layout of bitsandbytes: its logits differ by up to 0.8 %, and texts may.",
    ),
    "bitsandbytes NF4 with bf16": NumberFormat(
        torch.bfloat16,
        partial(_nf4, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
        5e-2,
        0.3,
        tokens=False,
        note="Model, products and scales are as QLoRA has them. PEFT rounds an adapter's results to "
        "bf16 there; a client keeps them in fp32.",
    ),
    "bitsandbytes int8": NumberFormat(
        torch.float32,
        lambda: _bitsandbytes(load_in_8bit=True),
        5e-2,
        0.3,
        tokens=False,
        note="bitsandbytes rounds the rows of a batch to integers; the executor does not.",
    ),
}
_IN_BF16 = (
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "MixtralForCausalLM"),
    *("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "MambaForCausalLM", "T5ForConditionalGeneration"),
    *("BertForSequenceClassification", "ViTForImageClassification", "LlavaForConditionalGeneration"),
    "LongcatFlashForCausalLM",
)
_QUANTIZED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM")
_TRIED = {"bf16": _IN_BF16, "torchao int4": _QUANTIZED[:1]}
IN_FORMATS = tuple(
    f"{name} in {format_}"
    for format_ in FORMATS
    if format_ == "bf16" or find_spec(format_.partition(" ")[0])
    for name in _TRIED.get(format_, _QUANTIZED)
)
"""Models in formats that are tried by default, as far as the libraries of the formats are installed."""


def split_name(name: str) -> tuple[str, str | None]:
    """Return class and format of a name such as ``"T5Model in bf16"``; of any other name, the name and None."""
    model, _, format_ = name.partition(" in ")
    return (model, format_) if model in ZOO and format_ in FORMATS else (name, None)


def limits_of(name: str, model: Any = None, method: str = "") -> NumberFormat:
    """Return the format in a name, with the limits that hold for it and for a PEFT method; for any other name, that of
    the model's quantization, or fp32."""
    _, format_ = split_name(name)
    if format_ == "bf16" and method in ROUND_OTHERWISE:
        return FORMATS[format_]._replace(computed=0.1, tokens=False)
    if format_ is not None:
        return FORMATS[format_]
    given = getattr(getattr(model, "config", None), "quantization_config", None)
    narrow = getattr(given, "bnb_4bit_compute_dtype", torch.float32) is not torch.float32
    if getattr(given, "load_in_8bit", False):
        return FORMATS["bitsandbytes int8"]
    return FORMATS["bitsandbytes NF4 with bf16"] if getattr(given, "load_in_4bit", False) and narrow else FP32


def keep_trainable(model: Any) -> Any:
    """Return the model after its 4-bit layers were told to keep their layout. On some CPUs bitsandbytes would lay the
    weights out for inference, and then give no gradients."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def model_in(name: str, format_: NumberFormat) -> Any:
    """Return a model of the zoo in a format, made by transformers."""
    if format_.quantization is None:
        return zoo_model(name).to(format_.dtype)
    # NF4 has blocks of 64 numbers. With larger weights, other rounding sends tokens of a mixture to other experts.
    model = zoo_model(name, hidden_size=64, intermediate_size=128, initializer_range=0.02)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        made = type(model).from_pretrained(folder, quantization_config=format_.quantization(), dtype=format_.dtype)
    return keep_trainable(made.eval())
