"""TRL: SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RewardTrainer with LoRA."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from symbiosis.testing import tiny_model
from tests.ecosystem.common import compare, losses
from tests.service import WORDS

TEXTS = [" ".join(WORDS[index % 9 : index % 9 + 6]) for index in range(16)]
PAIRS = {"prompt": TEXTS, "chosen": [f" {WORDS[i % 5]} log" for i in range(16)], "rejected": [" mat ran"] * 16}
LABELLED = {"prompt": TEXTS, "completion": [f" {WORDS[i % 7]} log" for i in range(16)], "label": [True, False] * 8}


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def train(kind: str, data: Any, model: Any, tokenizer: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Train an adapter with TRL's trainer of this kind, and return losses and the saved adapter."""
    config = getattr(trl, f"{kind}Config")(**arguments(folder), **options)
    rewards = {"reward_funcs": length} if kind == "GRPO" else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"),
        **rewards,
    )
    found = losses(trainer)
    trainer.save_model(str(folder))
    return {"losses": found, "trained adapter": load_file(folder / "adapter_model.safetensors")}


def length(completions: list[str], **_: Any) -> list[float]:
    """Reward completions with few letters."""
    return [-float(len(completion)) for completion in completions]


def in_chunks(*args: Any) -> dict[str, Any]:
    """Multiply by parts of ``lm_head.weight``, as for a vocabulary that is larger than a chunk."""
    with mock.patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 24):
        return train("SFT", {"text": TEXTS}, *args)


JOBS = {
    "SFTTrainer": partial(train, "SFT", {"text": TEXTS}),
    "SFTTrainer, no checkpointing": partial(train, "SFT", {"text": TEXTS}, gradient_checkpointing=False),
    "SFTTrainer, packing": partial(train, "SFT", {"text": TEXTS}, packing=True, max_length=16),
    "SFTTrainer, loss dft": partial(train, "SFT", {"text": TEXTS}, loss_type="dft"),
    "SFTTrainer, chunks": in_chunks,
    "DPOTrainer": partial(train, "DPO", PAIRS),
    "DPOTrainer, precompute_ref_log_probs": partial(train, "DPO", PAIRS, precompute_ref_log_probs=True),
    "KTOTrainer": partial(train, "KTO", LABELLED),
    "KTOTrainer, precompute_ref_log_probs": partial(train, "KTO", LABELLED, precompute_ref_log_probs=True),
    "GRPOTrainer": partial(train, "GRPO", {"prompt": TEXTS}, beta=0.1, num_generations=2, max_completion_length=8),
}

REWARD = {"RewardTrainer": partial(train, "Reward", PAIRS)}


def scorer() -> Any:
    """Return a small model with one score per sequence."""
    torch.manual_seed(0)
    config = tiny_model().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


if __name__ == "__main__":
    compare("trl", JOBS)
    compare("trl", REWARD, model=scorer(), auto=AutoModelForSequenceClassification)
