"""sentence-transformers: a served encoder that embeds sentences and is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import AutoModel, BertConfig, BertModel

from tests.ecosystem.common import compare, losses
from tests.service import WORDS

TEXTS = [" ".join(WORDS[index % 9 : index % 9 + 6]) for index in range(16)]


def embed(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Embed sentences before and after a training with LoRA."""

    class Opened(Transformer):
        """The module of a model that is open already."""

        def _load_model(self, *args: object, **options: object) -> Any:
            return get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"]))

    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = Opened(str(folder))
    sentences = SentenceTransformer(modules=[transformer, Pooling(model.config.hidden_size)], device="cpu")
    before = sentences.encode(TEXTS)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=sentences,
        args=arguments,
        train_dataset=Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[1:] + TEXTS[:1]}),
        loss=MultipleNegativesRankingLoss(sentences),
    )
    found = {"embeddings": before, "losses": losses(trainer), "trained embeddings": sentences.encode(TEXTS)}
    sentences.save(str(folder / "saved"))
    return {**found, "trained adapter": load_file(folder / "saved" / "adapter_model.safetensors")}


if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    compare("sentence-transformers", {"encode, train": embed}, model=BertModel(config), auto=AutoModel)
