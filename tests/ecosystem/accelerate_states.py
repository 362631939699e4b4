"""accelerate: a training loop with Accelerator.prepare, save_state, load_state and save_model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.ecosystem.common import compare, without_placeholders


def train(model: Any, _: Any, folder: Path) -> dict[str, Any]:
    """Train three steps, save, train three more, and train these again from the saved state."""
    accelerator = Accelerator(cpu=True)
    tuned = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    data = DataLoader(torch.arange(240).view(30, 8) % 60 + 3, batch_size=5)
    tuned, optimizer, data = accelerator.prepare(tuned, optimizer, data)
    tuned.train()

    def steps(batches: list[torch.Tensor]) -> list[float]:
        found = []
        for ids in batches:
            loss = tuned(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    batches = list(data)
    first = steps(batches[:3])
    accelerator.save_state(str(folder))
    then = steps(batches[3:])
    accelerator.load_state(str(folder))
    assert steps(batches[3:]) == then
    accelerator.save_model(tuned, str(folder / "model"))
    without_placeholders(load_file(folder / "model" / "model.safetensors"))
    saved = without_placeholders(load_file(folder / "model.safetensors"))
    return {"losses": first + then, "trained adapter": {n: t for n, t in saved.items() if "lora" in n}}


if __name__ == "__main__":
    compare("accelerate", {"prepare, save_state, load_state, save_model": train})
