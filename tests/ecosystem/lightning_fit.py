"""Lightning: fit, a checkpoint, a fit that resumes from it, and an exponential moving average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
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


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(320).view(40, 8) % 60 + 3, batch_size=5)


def fit(model: Any, _: Any, folder: Path) -> dict[str, Any]:
    """Train four steps, then four more from the checkpoint."""
    tuned = Tuned(get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")))
    for steps, checkpoint in ((4, None), (8, folder / "last.ckpt")):
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=4)],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(tuned, loader(), ckpt_path=checkpoint, weights_only=True)
    saved = without_placeholders(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    assert len(tuned.losses) == 8
    return {"losses": tuned.losses, "trained adapter": {name: t for name, t in saved.items() if "lora" in name}}


class Hidden(Tuned):
    """A module with the trainable parameters only, for callbacks that average all parameters of a module."""

    def __init__(self, model: Any) -> None:
        super().__init__(None)
        self.trainable = torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)
        object.__setattr__(self, "model", model)


def average(model: Any, _: Any, folder: Path) -> dict[str, Any]:
    """Train with an exponential moving average of the adapter."""
    tuned = Hidden(get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM")))
    trainer = lightning.Trainer(
        max_steps=8,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[EMAWeightAveraging(decay=0.5)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(tuned, loader())
    trainer.save_checkpoint(folder / "averaged.ckpt")
    saved = without_placeholders(torch.load(folder / "averaged.ckpt", weights_only=True)["state_dict"])
    return {"losses": tuned.losses, "trained average": saved}


if __name__ == "__main__":
    compare("lightning", {"fit, checkpoint, resume": fit, "average of the adapter": average})
