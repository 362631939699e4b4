"""From the command's options to four tenants: which model, which texts, which adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from symbiosis.cli.data import Corpus, docstrings, read_halves, topics
from symbiosis.cli.demo.base_model import adapter_folder, base_model
from symbiosis.cli.demo.jobs import Generation, Plan, Training
from symbiosis.cli.demo.live import Steps
from symbiosis.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """The options of ``symbiosis demo``; None where the user left the choice to the demo."""

    model: str | None
    data: Path | None
    policy: str
    steps: int
    batch: int
    sequence: int | None
    device: str
    dtype: str | None
    seed: int


def make_plan(settings: Settings, out: Console) -> Plan:
    """Everything that can go wrong with the user's own model and data goes wrong here, before anything runs.

    Raises:
        UsageError: and the message says what to do instead.
    """
    device = _device(settings.device)
    own_data = None if settings.data is None else read_halves(settings.data)
    model, tokenizer, config = _model(settings, out)
    dtype = getattr(torch, settings.dtype) if settings.dtype else config.dtype or torch.float32
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    length = _sequence_length(settings.sequence, longest)
    first, second = own_data or _shipped_corpora()
    make = _Maker(settings, tokenizer, config, model, length)
    trainings = [
        make.training("alice", "LoRA", _lora(config, settings.model is None), first, 1),
        make.training("bob", "IA3", _ia3(config), second, 2),
    ]
    prompts = [*first.prompts, *second.prompts] if settings.model or settings.data else _TOPIC_PROMPTS
    generations = [
        Generation(name="carol", method="none", seed=settings.seed + 3, prompts=prompts),
        make.generation_with_adapter("dave", prompts),
    ]
    vocabulary = config.get_text_config().vocab_size
    if max(int(batch["input_ids"].max()) for job in trainings for batch in job.batches) >= vocabulary:
        raise UsageError(
            f"{model}: its tokenizer has tokens that the model, with {vocabulary}, has not; they do not belong"
        )
    return Plan(
        model=model,
        label=settings.model or f"a Llama of {_count(config)} parameters",
        tokenizer=tokenizer,
        trainings=trainings,
        generations=generations,
        new_tokens=min(40, longest // 4),
        longest_prompt=min(256, longest // 4),
        policy=settings.policy,
        device=device,
        dtype=dtype,
        notes=_notes(settings, first, second),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise UsageError(
            f"--device {name}: torch cannot use it here ({str(error).splitlines()[0]}); try cpu"
        ) from error
    if device.type == "meta":
        raise UsageError("--device meta: there is nothing to compute with; try cpu")
    return device


def _sequence_length(wanted: int | None, longest: int) -> int:
    if wanted is not None and wanted > longest:
        raise UsageError(f"--sequence {wanted}: the model reads at most {longest} tokens; give {longest} or less")
    return wanted or min(96, longest)


def _model(settings: Settings, out: Console) -> tuple[str, Any, Any]:
    """Folder or hub id, tokenizer and configuration."""
    from transformers import AutoConfig, AutoTokenizer

    name = settings.model
    if name is None:
        name = str(_demo_model(out))
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--model {name}: cannot be loaded; give a folder with a transformers model and its tokenizer, or a hub id "
            f"({reason})"
        ) from error
    return name, tokenizer, config


def _demo_model(out: Console) -> Path:
    with Steps(out) as progress:

        def report(what: str, step: int, steps: int, loss: float) -> None:
            progress(f"first run only: training the {what}", step, steps, f"loss {loss:.2f}")

        return base_model(_adapter_corpus(), report)


def _count(config: Any) -> str:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million"


def _notes(settings: Settings, first: Corpus, second: Corpus) -> list[str]:
    shortened = first.shortened + second.shortened
    if not shortened:
        return []
    return [
        f"{shortened} of {len(first.pairs) + len(second.pairs)} pairs are longer than a sequence; the beginning of "
        "their prompt is left out (--sequence makes room)"
    ]


# -------------------------------------------------------------------------------------------------------- the tenants


class _Maker:
    """Makes tenants of the same settings."""

    def __init__(self, settings: Settings, tokenizer: Any, config: Any, model: str, length: int) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._config = config
        self._model = model
        self._length = length

    def training(self, name: str, method: str, config: Callable[[], Any], corpus: Corpus, number: int) -> Training:
        settings, seed = self._settings, self._settings.seed + number
        small = {"LoRA": 5e-3, "IA3": 3e-2}  # the demo's own model is small, and learns at rates that suit it
        own = {"LoRA": 5e-4, "IA3": 8e-3}
        return Training(
            name=name,
            method=method,
            config=config,
            seed=seed,
            learning_rate=(small if settings.model is None else own)[method],
            text=corpus.name,
            batches=corpus.batches(
                self._tokenizer, steps=settings.steps, size=settings.batch, length=self._length, seed=seed
            ),
            prompts=corpus.prompts,
        )

    def generation_with_adapter(self, name: str, prompts: list[str]) -> Generation:
        """With the prefix trained for the demo's own model; on other models, with a soft prompt that starts as text."""
        seed = self._settings.seed + 4
        if self._settings.model is None:
            folder = adapter_folder(Path(self._model))
            return Generation(name=name, method="prefix tuning", adapter=folder, seed=seed, prompts=prompts)
        model = self._model

        def config() -> Any:
            from peft import PromptTuningConfig

            return PromptTuningConfig(
                task_type="CAUSAL_LM",
                prompt_tuning_init="TEXT",
                prompt_tuning_init_text="Continue in plain English:",
                num_virtual_tokens=8,
                tokenizer_name_or_path=model,
            )

        return Generation(name=name, method="prompt tuning", config=config, seed=seed, prompts=prompts)


def _lora(config: Any, everywhere: bool) -> Callable[[], Any]:
    """LoRA where PEFT puts it by default, or on every linear layer; with dropout, which must come out the same too."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    target = "all-linear" if everywhere or config.model_type not in KNOWN else None
    return lambda: LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=target)


def _ia3(config: Any) -> Callable[[], Any]:
    """IA3 where PEFT puts it by default, or on the output of every linear layer."""
    from peft import IA3Config
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN

    if config.model_type in KNOWN:
        return lambda: IA3Config(task_type="CAUSAL_LM")
    return lambda: IA3Config(task_type="CAUSAL_LM", target_modules="all-linear", feedforward_modules=[])


# ---------------------------------------------------------------------------------------------------------- the texts

_TOPIC_PROMPTS = ['The "with" statement', "A list is", "When an exception is raised", "Python"]


def _shipped_corpora() -> tuple[Corpus, Corpus]:
    """Documentation of two modules, each with a style of its own; of the language where a module is missing."""
    turtle = docstrings("turtle", "Turtle instance named turtle")
    decimal = docstrings("_pydecimal", ">>>")
    half = len(topics()) // 2
    return (
        Corpus("docstrings of turtle", documents=turtle, prompts=["Move the turtle", "Return the"])
        if turtle
        else Corpus("help() topics, A–", documents=topics()[:half], prompts=_TOPIC_PROMPTS[:2]),
        Corpus("docstrings of decimal", documents=decimal, prompts=["Returns the", ">>> ExtendedContext"])
        if decimal
        else Corpus("help() topics, –Z", documents=topics()[half:], prompts=_TOPIC_PROMPTS[2:]),
    )


def _adapter_corpus() -> Corpus:
    """What the prefix of the tenant who only generates was trained on."""
    return Corpus("docstrings of doctest", documents=docstrings("doctest") or topics())
