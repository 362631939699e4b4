"""Losses that multiply by ``lm_head.weight`` themselves, as those of TRL and Liger do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import IDS

__all__ = ["LOSSES", "Chunked", "step"]


class Chunked(torch.autograd.Function):
    """Cross entropy as in TRL: by parts of the vocabulary, whose logits are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(x), len(weight))
        for start in range(0, len(weight), 24):
            torch.mm(x, weight[start : start + 24].to(x.dtype).t(), out=logits[:, start : start + 24])
        ctx.save_for_backward(x, weight, targets)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight, targets = ctx.saved_tensors
        log_z = torch.logsumexp(x @ weight.t(), -1, keepdim=True)
        dx = torch.zeros_like(x)
        for start in range(0, len(weight), 24):
            part = weight[start : start + 24].to(x.dtype)
            tile = (x @ part.t() - log_z).exp()
            here = torch.arange(start, start + len(part)) == targets[:, None]
            dx.addmm_((tile - here.float()).float(), part.float())
        return dy * dx / len(x), None, None


class GradientInForward(torch.autograd.Function):
    """Cross entropy as in Liger: its gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.t()
        dy = (logits.softmax(-1) - F.one_hot(targets, len(weight))) / len(x)
        ctx.save_for_backward(dy @ weight)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy * ctx.saved_tensors[0], None, None


def through_checkpoint(use_reentrant: bool) -> Callable[..., torch.Tensor]:
    return lambda *args: checkpoint(Chunked.apply, *args, use_reentrant=use_reentrant)  # type: ignore[no-any-return]


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "chunked": Chunked.apply,
    "gradient-in-forward": GradientInForward.apply,
    "checkpoint": through_checkpoint(False),
    "checkpoint-reentrant": through_checkpoint(True),
    "plain-operations": lambda x, weight, targets: F.cross_entropy(x @ weight.t(), targets),
}


def step(model: Any, loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the loss of a Llama with an adapter."""
    backbone, head = model.get_base_model().model, model.get_base_model().lm_head
    hidden = backbone(input_ids=IDS).last_hidden_state[:, :-1].reshape(-1, 32)
    return loss_of(hidden, head.weight, IDS[:, 1:].reshape(-1))
