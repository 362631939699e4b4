"""Lightning: fit, a checkpoint, and a fit that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from tests.ecosystem.common import compare, without_placeholders


class Tuned(lightning.LightningModule):
    """A module that wraps the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(model: Any, _: Any, folder: Path) -> dict[str, Any]:
    """Train four steps, then four more from the checkpoint."""
    tuned = Tuned(get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")))
    data = DataLoader(torch.arange(320).view(40, 8) % 60 + 3, batch_size=5)
    for steps, checkpoint in ((4, None), (8, folder / "last.ckpt")):
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=4)],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(tuned, data, ckpt_path=checkpoint, weights_only=True)
    saved = without_placeholders(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    assert len(tuned.losses) == 8
    return {"losses": tuned.losses, "trained adapter": {name: t for name, t in saved.items() if "lora" in name}}


if __name__ == "__main__":
    compare("lightning", {"fit, checkpoint, resume": fit})
