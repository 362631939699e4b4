"""lm-eval-harness: a task with choices, one with perplexity and one that generates, on local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from tests.ecosystem.common import compare
from tests.service import WORDS


def evaluate(model: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Return the metrics of all tasks, and the log-likelihood of every choice."""
    folder.mkdir(parents=True)
    rows = [{"text": " ".join(WORDS[i % 9 : i % 9 + 6]), "choices": ["the cat", "mat ran", "log"]} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choices = {"output_type": "multiple_choice", "doc_to_target": 1, "doc_to_choice": "choices"}
    perplexity = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    generation = {"output_type": "generate_until", "doc_to_target": "the cat"}
    generation["generation_kwargs"] = {"until": ["</s>"], "max_gen_toks": 8, "do_sample": False}
    metric = {"metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4),
        tasks=[
            {**common, **choices, "task": "choices"},
            {**common, **perplexity, **metric, "task": "perplexity"},
            {**common, **generation, "task": "generation"},
        ],
        bootstrap_iters=0,
    )
    metrics = {
        f"{task} {name}": value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    scores = [[float(choice[0][0]) for choice in sample["resps"]] for sample in found["samples"]["choices"]]
    texts = [sample["resps"][0][0] for sample in found["samples"]["generation"]]
    return {"metrics": metrics, "log-likelihoods": scores, "generated tokens": tokenizer(texts, padding=True).input_ids}


if __name__ == "__main__":
    compare("lm_eval", {"choices, perplexity, generation": evaluate})
