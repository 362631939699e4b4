"""The PEFT method that the options of ``symbiosis finetune`` name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from symbiosis.cli.config import refuse_unknown
from symbiosis.errors import UsageError


def method_of(lora: str, ia3: bool, prefix: int | None, file: Path | None, lora_given: bool) -> tuple[Any, str]:
    """Return the PEFT configuration that options name, and the option that does.

    Args:
        lora, ia3, prefix, file: values of --lora, --ia3, --prefix and --peft.
        lora_given: whether --lora was given; its default value counts where no other method is.

    Raises:
        UsageError: several options name a method, or the configuration is not valid.
    """
    given = {"--lora": lora_given, "--ia3": ia3, "--prefix": prefix is not None, "--peft": file is not None}
    named = [option for option, is_given in given.items() if is_given]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} each name a PEFT method; give one of them")
    if file is not None:
        return read_config(file), f"--peft {file}"
    if ia3:
        from peft import IA3Config

        return IA3Config(task_type="CAUSAL_LM"), "--ia3"
    if prefix is not None:
        from peft import PrefixTuningConfig

        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=prefix), f"--prefix {prefix}"
    return lora_config(lora), f"--lora {lora}"


def lost_in_checkpoints(config: Any, *, resume: bool) -> str:
    """Return what PEFT's checkpoints of this method lack; empty if nothing.

    Args:
        resume: whether training is to go on from one. Otherwise the best one is to become the adapter.
    """
    if config.peft_type == "P_TUNING" or getattr(config, "prefix_projection", False):
        return "its encoder"
    if resume and getattr(config, "save_only_topk_weights", False):
        return "all logits but the largest (save_only_topk_weights)"
    return "the importance of its ranks" if config.peft_type == "ADALORA" else ""


def read_config(file: Path) -> Any:
    """Return the PEFT configuration of a JSON file.

    Raises:
        UsageError: the file cannot be read, or PEFT does not take it.
    """
    from peft import PeftConfig, PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    where = f"--peft {file}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        raise UsageError(f'{where}: give an object with "peft_type", such as {{"peft_type": "IA3"}}')
    if values.setdefault("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        raise UsageError(f'{where}: finetune trains causal language models; leave "task_type" out')
    values["peft_type"] = values["peft_type"].upper()
    refuse_unknown(where, values["peft_type"], sorted(PEFT_TYPE_TO_CONFIG_MAPPING), "peft_type")
    known = fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(values["peft_type"])])
    for key in values:  # PEFT only warns of a misspelt one
        refuse_unknown(where, key, sorted(field.name for field in known))
    try:
        return PeftConfig.from_peft_type(**{**values, "inference_mode": False})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error


def lora_config(text: str) -> Any:
    """Return the configuration for a text such as ``"r=8,alpha=16,targets=q_proj+v_proj"``.

    Raises:
        UsageError: an option is unknown, or its value is not a number.
    """
    from peft import LoraConfig

    options: dict[str, Any] = {}
    known = {"r": ("r", int), "alpha": ("lora_alpha", int), "dropout": ("lora_dropout", float)}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if known.get(name, ("target_modules",))[0] in options:
            raise UsageError(f"--lora {text}: {name} is given twice")
        try:
            if name == "targets":
                options["target_modules"] = value if value == "all-linear" else value.split("+")
            else:
                option, kind = known[name]
                options[option] = kind(value)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"--lora {part!r}: write r=8, alpha=16, dropout=0.05 or targets=q_proj+v_proj, joined with commas"
            ) from error
    if options.get("r", 1) < 1 or options.get("lora_alpha", 1) < 1:
        raise UsageError(f"--lora {text}: r and alpha are 1 or more")
    if not 0 <= options.get("lora_dropout", 0.0) < 1:
        raise UsageError(f"--lora {text}: dropout is a probability, at least 0 and less than 1")
    return LoraConfig(task_type="CAUSAL_LM", **options)
