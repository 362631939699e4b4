"""Tries models and PEFT methods: does a client get what plain ``transformers`` + PEFT gives?

A *cell* is one model with one PEFT method over one transport. Its job computes logits, generates greedily and by
sampling where the model generates, computes gradients, takes three optimizer steps, and saves and loads the adapter.
Its verdict is *equal*, *refused* with a reason, *not in plain PEFT* if the same job fails there too, or *wrong*.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.client.client import Client
from symbiosis.client.connect import connect
from symbiosis.errors import CannotWaitError, PeerError, RequestError, UsageError
from symbiosis.executor.choosing import HEADS
from symbiosis.executor.experts import is_bank
from symbiosis.executor.loading import class_of, load_model
from symbiosis.executor.sharing import describe, size_text, sizes_text
from symbiosis.host import Executor
from symbiosis.testing.compare import Comparison, Job, difference_of, logits_of, run_job, run_job_plain
from symbiosis.testing.formats import FORMATS, keep_trainable, limits_of, model_in, split_name
from symbiosis.testing.zoo import GENERATING, ZOO, random_model, zoo_inputs, zoo_model

EQUAL, REFUSED, NOT_PLAIN, WRONG = "equal", "refused", "not in plain PEFT", "wrong"
VERDICTS = (EQUAL, REFUSED, NOT_PLAIN, WRONG)
WITHIN_S = 120.0
"""Seconds after which a client's job counts as hanging, if the plain job is quick."""
TIMES = 20
"""The same as a multiple of the plain job's time. Clients of the table take up to 8 times as long, with all set-up."""
COPIES = 5
"""Copies of a model in fp32 that a trial has at once, as measured: the model, one that is served, a plain one, one
that loads what was saved, and one that waits for Python to collect it."""
TRANSPORTS = ("inproc", "shm")


_LINEAR = "linear"
_NOT_ADAPTED = re.compile(r"router|gate$|(mixer|mamba)\.out_proj")
"""Routers, some of which give more than a product, and layers that PEFT does not adapt in Mamba."""


_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that PEFT takes for experts in a mixture."""


def _linear(model: Any) -> list[str]:
    """Return the last parts of the names of linear layers, apart from heads."""
    skipped = _EXPERTS if any(map(is_bank, model.modules())) else ()
    heads = {id(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None)}
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
            and id(module) not in heads
            and not name.partition(".")[0].endswith(HEADS)
            and not _NOT_ADAPTED.search(name)
            and name.rpartition(".")[2] not in skipped
        }
    )


def _lora(**options: Any) -> Callable[[str | None, Any], Any]:
    return _peft("LoraConfig", **{"r": 4, "init_lora_weights": False, "target_modules": _LINEAR, **options})


def _peft(name: str, **options: Any) -> Callable[[str | None, Any], Any]:
    def make(task: str | None, model: Any) -> Any:
        import peft

        given = {name: _linear(model) if value is _LINEAR else value for name, value in options.items()}
        return getattr(peft, name)(**given, task_type=task)

    return make


LEAST_SERVED = 0.9
"""Served part of the weights below which results say what is not served."""
_ALL = {"target_modules": _LINEAR}
METHODS: dict[str, Callable[[str | None, Any], Any]] = {
    "none": lambda task, model: None,
    "LoRA": _lora(),
    "IA3": _peft("IA3Config", init_ia3_weights=False, feedforward_modules=[], **_ALL),
    "prefix tuning": _peft("PrefixTuningConfig", num_virtual_tokens=3),
    "prompt tuning": _peft("PromptTuningConfig", num_virtual_tokens=3),
    "P-tuning": _peft("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=16),
    "adaption prompt": _peft("AdaptionPromptConfig", adapter_len=3, adapter_layers=1),
    "LoRA, all-linear": _lora(target_modules="all-linear"),
    "rsLoRA": _lora(use_rslora=True),
    "LoRA, lm_head": _lora(target_modules=["q_proj", "lm_head"]),
    "LoRA, embedding": _lora(target_modules=["q_proj", "embed_tokens"]),
    "LoRA, norms saved": _lora(target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
    "LoRA, lm_head saved": _lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "LoRA, tokens": _lora(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "LoRA, experts": _lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    "DoRA": _lora(use_dora=True),
    "PiSSA": _lora(init_lora_weights="pissa"),
    "OLoRA": _lora(init_lora_weights="olora"),
    "EVA": _lora(init_lora_weights="eva"),
    "LN tuning": _peft("LNTuningConfig", target_modules=["input_layernorm"]),
    "AdaLoRA": _peft("AdaLoraConfig", total_step=10, init_r=6, target_r=4, init_lora_weights=False, **_ALL),
    "LoHa": _peft("LoHaConfig", r=4, init_weights=False, **_ALL),
    "LoKr": _peft("LoKrConfig", r=4, init_weights=False, **_ALL),
    "VeRA": _peft("VeraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "FourierFT": _peft("FourierFTConfig", n_frequency=16, init_weights=False, target_modules=["q_proj", "v_proj"]),
    "OFT": _peft("OFTConfig", r=0, oft_block_size=4, init_weights=False, target_modules=["q_proj", "v_proj"]),
    "BOFT": _peft("BOFTConfig", boft_block_size=4, init_weights=False, target_modules=["q_proj", "v_proj"]),
    "HRA": _peft("HRAConfig", r=4, init_weights=False, target_modules=["q_proj", "v_proj"]),
    "VB-LoRA": _peft("VBLoRAConfig", r=4, num_vectors=8, vector_length=8, target_modules=["q_proj", "v_proj"]),
    "MiSS": _peft("MissConfig", r=4, init_weights=False, target_modules=["q_proj", "v_proj"]),
    "RandLoRA": _peft("RandLoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "trainable tokens": _peft("TrainableTokensConfig", token_indices=[3, 4], target_modules=["embed_tokens"]),
    "DEFT": _peft("DeftConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "ADAMSS": _peft("AdamssConfig", r=4, num_subspaces=2, target_modules=["q_proj", "v_proj"]),
    "POLY": _peft("PolyConfig", r=4, n_tasks=1, target_modules=["q_proj", "v_proj"]),
}
"""PEFT methods by name; each makes a configuration for a task type."""
BROAD = ("none", "LoRA", "IA3", "prefix tuning")
"""Methods that every model is tried with. Llama and one mixture of experts are tried with all."""
DEEP = ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
_READS = {
    "ForCausalLM": "text",
    "LMHeadModel": "text",
    "ForSequenceClassification": "class",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "answer",
    "ForMaskedLM": "masked",
}
"""What a model of one's own reads, by the end of its class's name."""
_FITTED = ("pairs", "image", "mel", "wave")
"""Further inputs for a user's model whose class is in the zoo, whose inputs have fitting sizes."""
_TASKS = {
    "text": "CAUSAL_LM",
    "image and text": "CAUSAL_LM",
    "pairs": "SEQ_2_SEQ_LM",
    "class": "SEQ_CLS",
    "tokens": "TOKEN_CLS",
    "answer": "QUESTION_ANS",
}
"""PEFT's task type by what a model reads."""


@dataclass(frozen=True)
class Cell:
    """The result of one model with one method over one transport."""

    model: str
    method: str
    transport: str
    verdict: str
    detail: str
    """Why it was refused or fails in plain PEFT, or what is wrong; for *equal*, the largest relative difference."""


@dataclass(frozen=True)
class ServedPart:
    """What is served of a model."""

    model: str
    reads: str
    served: float
    """Part of the weights that is served, from 0 to 1, without those that every client has: embeddings, heads of
    classifiers, norms and biases."""
    served_bytes: int
    """Bytes that are served once for all tenants."""
    held_bytes: int
    """Bytes that are with each tenant."""
    unserved: tuple[str, ...]
    """Descriptions of other weights."""

    def sizes(self) -> str:
        """Return the bytes as text."""
        return sizes_text(self.served_bytes, self.held_bytes)


def cells_of(name: str, methods: list[str] | None, transports: list[str]) -> list[tuple[str, str]]:
    """Return method and transport of all cells for a model; by default with the methods that it is tried with."""
    chosen = methods or (METHODS if name in DEEP else BROAD)
    return [(method, transport) for method in chosen for transport in transports]


def load(name: str, dtype: torch.dtype | None = torch.float32) -> tuple[Any, str]:
    """Return a model and what it reads: a class of the zoo, also in a format (``LlamaForCausalLM in bf16``), or a model
    in a folder or at a hub id. If only a configuration is given, weights are random.

    Args:
        name: the model's name, folder, hub id or configuration.
        dtype: precision of a model of one's own; None for that of the checkpoint, in which an executor serves it.

    Returns:
        The model, and what it reads; nothing (``""``) if that is not known. Models of images and text are tried with
        text alone, and those without a head with the mean of their squared outputs as loss.

    Raises:
        UsageError: there is no such model.
    """
    known, format_ = split_name(name)
    if known in ZOO:
        try:
            model = zoo_model(known) if format_ is None else model_in(known, FORMATS[format_])
        except ImportError as error:
            raise UsageError(f"{name}: a library of this format is missing ({_first_line(error)})") from error
        return model, ZOO[known].reads
    try:
        model = _of_config(name, dtype) if _has_no_weights(Path(name)) else load_model(name, dtype=dtype or "auto")
        keep_trainable(model)
    except (OSError, ValueError, ImportError, SafetensorError, UsageError) as error:
        raise UsageError(
            f"{name}: no class of the table, and no model that can be loaded ({_first_line(error)})"
        ) from error
    return model, next((reads for reads in _readings(model) if _takes(model, reads)), "")


def _readings(model: Any) -> Iterator[str]:
    """Yield what a model of one's own may read, by its class."""
    kind = type(model).__name__
    if kind in ZOO and ZOO[kind].reads in _FITTED:
        yield ZOO[kind].reads
    if getattr(model, "main_input_name", None) != "input_ids":
        return
    yield from (reads for ending, reads in _READS.items() if kind.endswith(ending))
    if hasattr(model.config, "text_config") and kind.endswith("ForConditionalGeneration"):
        yield "text"
    if kind.endswith("Model") and not model.config.is_encoder_decoder:
        yield "features"


def _takes(model: Any, reads: str) -> bool:
    """Return whether a model runs on such inputs."""
    try:
        with torch.no_grad():
            model.eval()(**zoo_inputs(model, reads, 0))
    except Exception:  # noqa: BLE001 (whatever a model raises for inputs that are not its own)
        return False
    return True


def _has_no_weights(path: Path) -> bool:
    """Return whether a path is a configuration's file, or a folder with one and without weights."""
    if path.is_file():
        return True
    return (path / "config.json").is_file() and not any(
        file.suffix in (".safetensors", ".bin") for file in path.iterdir()
    )


def _of_config(name: str, dtype: torch.dtype | None) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if given := getattr(config, "quantization_config", None):
        method = given.get("quant_method") if isinstance(given, dict) else given
        raise UsageError(
            f"its quantization ({method}) needs weights; give a folder with the checkpoint, or leave "
            "quantization_config out to try the model without it"
        )
    model_class = class_of(config)
    make = partial(getattr(model_class, "from_config", None) or model_class._from_config)
    with torch.device("meta"):
        needed = COPIES * sum(parameter.numel() for parameter in make(config).parameters()) * 4
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"a trial takes {size_text(needed)} of memory, and {size_text(free)} are free; lower num_hidden_layers in "
            "a copy of the configuration"
        )
    return random_model(partial(make, dtype=dtype or config.dtype or torch.float32), config)


async def try_cell(name: str, model: Any, reads: str, method: str, transport: str) -> Cell:
    """Run the job of a cell, and compare.

    Args:
        name: the model's name.
        model: the model. A copy is served.
        reads: what it reads; see :class:`~symbiosis.testing.zoo.Entry`.
        method: a name in :data:`METHODS`.
        transport: a name in :data:`TRANSPORTS`.
    """
    inputs = partial(_with_task, model, reads) if method == "POLY" else partial(zoo_inputs, model, reads)
    prepare = partial(_factor_inputs, inputs) if method == "EVA" else None
    loss = _square if reads == "features" else None
    job = Job(steps=3, new_tokens=6 if reads in GENERATING else 0, inputs=inputs, prepare=prepare, loss=loss)
    task, limits = _TASKS.get(reads), limits_of(name, model, method)
    verdict = partial(Cell, name, method, transport)
    try:
        config = METHODS[method](task, model)
        began = monotonic()
        expected = run_job_plain(model, config, job)
        plain_s = monotonic() - began
    except Exception as error:  # noqa: BLE001 (whatever transformers and PEFT raise)
        return verdict(NOT_PLAIN, f"{type(error).__name__}: {_first_line(error)}")
    opened, within_s = False, max(WITHIN_S, TIMES * plain_s)
    limit = asyncio.timeout(within_s)
    try:
        async with limit, _clients(model, transport) as make, make(copy.deepcopy(config)) as client:
            opened = True
            comparison = Comparison.of(await run_job(client, job), expected)
            problem = None if config is None else await _save_and_load(client, make, model, job, limits.computed)
    except Exception as error:  # noqa: BLE001 (the verdict says what it was)
        if limit.expired():
            detail = f"the client did not finish within {within_s:.0f} s; the plain job took {plain_s:.1f} s"
            return verdict(WRONG, detail)
        # An executor that refuses the rows of a client that it has accepted does not refuse the method.
        failed = opened and isinstance(error, RequestError | CannotWaitError | PeerError)
        if isinstance(error, UsageError | PeerError) and not failed:
            return verdict(REFUSED, _first_line(error))
        return verdict(WRONG, f"{type(error).__name__}: {_first_line(error)}")
    # A trained adapter is judged by what training changed, which is small beside the adapter's first values.
    ignored = ("adapter",) if limits.tokens else ("adapter", "greedy", "sampled")
    computed = max(value for name, value in comparison.differences.items() if not name.startswith(ignored))
    if computed > limits.computed or comparison.trained > limits.trained:
        return verdict(WRONG, str(comparison))
    return verdict(EQUAL, f"{max(computed, comparison.trained):.1g}") if problem is None else verdict(WRONG, problem)


def _with_task(model: Any, reads: str, number: int) -> dict[str, Any]:
    """Return inputs with the numbers of the examples' tasks, which POLY asks for."""
    return zoo_inputs(model, reads, number) | {"task_ids": torch.zeros(2, dtype=torch.long)}


def _square(output: Any) -> torch.Tensor:
    """Return a loss of a model without a head."""
    hidden: torch.Tensor = output.last_hidden_state
    return hidden.float().square().mean()


def _factor_inputs(inputs: Callable[[int], dict[str, Any]], model: Any) -> None:
    """Initialise an adapter by EVA, from what the layers read of three batches."""
    from peft import initialize_lora_eva_weights

    initialize_lora_eva_weights(model, [inputs(number) for number in range(3)], show_progress_bar=False)


@contextlib.asynccontextmanager
async def _clients(model: Any, transport: str) -> AsyncIterator[Callable[[Any], Client]]:
    """Serve a copy of a model, and yield a function that makes a client for a PEFT configuration."""
    async with Executor(copy.deepcopy(model)) as executor:
        if transport == "inproc":
            yield lambda config: executor.client(config, seed=0)
            return
        with tempfile.TemporaryDirectory() as folder:
            address = f"shm://{folder}/socket"
            await executor.listen(address)
            async with connect(address) as base:
                yield lambda config: base.client(config, seed=0)


async def _save_and_load(
    client: Client, make: Callable[[Any], Client], model: Any, job: Job, limit: float
) -> str | None:
    """Save the trained adapter, load it with plain PEFT and in a new client, and compare logits. Return what is wrong,
    or None."""
    from peft import PeftModel

    client.model.eval()
    trained, again = [await client.run(_example, client.model, job) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            client.save_adapter(folder)
        except NotImplementedError:  # PEFT asks for embeddings beside an adapted head; models of speech have none
            client.model.save_pretrained(folder, save_embedding_layers=False)
        plain = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
        async with make(None) as other:
            other.load_adapter(folder)
            loaded, wanted = await other.run(_example, other.model, job), _example(plain, job)
    if not difference_of(loaded, wanted) <= limit:
        return (
            f"the saved adapter gives other logits in a client than in plain PEFT: {difference_of(loaded, wanted):.2g}"
        )
    if torch.equal(trained, again) and not difference_of(wanted, trained) <= limit:  # some models keep a state
        return f"the saved adapter gives other logits than the trained one: {difference_of(wanted, trained):.2g}"
    return None


@torch.no_grad()
def _example(model: Any, job: Job) -> torch.Tensor:
    return logits_of(model(**job.prompt(next(model.parameters()).device)))


def shares_of(name: str, model: Any, reads: str) -> ServedPart:
    """Return what is served of a model. A copy is split."""
    try:
        sharing = Executor(copy.deepcopy(model)).sharing
    except UsageError as error:
        return ServedPart(name, reads, 0.0, 0, 0, (_first_line(error),))
    part = sharing.served / max(sharing.served + sum(one.bytes for one in sharing.unserved), 1)
    return ServedPart(name, reads, part, sharing.served, sharing.held, tuple(describe(sharing.unserved)))


def as_data(shares: list[ServedPart], cells: list[Cell]) -> dict[str, Any]:
    """Return results as plain data."""
    return {"shares": [asdict(one) for one in shares], "cells": [asdict(one) for one in cells]}


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:497]}…"
