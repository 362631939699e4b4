"""The model that a joint walk runs: the skeleton of the base model, with the adapters of all clients of the walk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from symbiosis.client.experts import VirtExperts
from symbiosis.client.joint.adapters import Adapted, make_joint, seat_adapters
from symbiosis.client.joint.attention import INNER, NAME, JointCache, JointError, WalkAttention, structure, walk
from symbiosis.client.joint.stacks import Slot


class JointModel:
    """A skeleton that serves several clients in one walk.

    Args:
        skeleton: the clients' model in evaluation mode, for this purpose only.

    Attributes:
        module: the model. Nothing in it is a client's.
        settings: its configuration, as the clients' models have it.

    Raises:
        JointError: models of this kind cannot be walked jointly.
    """

    def __init__(self, skeleton: Any) -> None:
        _check(skeleton)
        self.module: nn.Module = skeleton
        self.settings: dict[str, Any] = skeleton.config.to_dict()
        self._model = skeleton
        self._inner = skeleton.config._attn_implementation
        self._layers = make_joint(skeleton)

    def seat(self, adapters: Sequence[tuple[Adapted, dict[str, Slot]]]) -> None:
        """Take the adapters of the clients of the next walk, in the order of its rows; none after the last walk."""
        seat_adapters(self._layers, adapters)

    def cache(self, caches: Sequence[Any]) -> JointCache:
        """Return the caches of the clients of a walk as one."""
        return JointCache(caches, self._inner)

    def forward(
        self, cache: JointCache, attention: Sequence[torch.Tensor | None], ids: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        """Return the model's output for tokens [N, 1] at positions [N, 1], given each client's mask [1, L] or None."""
        token = walk.set(WalkAttention(cache, attention))
        try:
            return self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        finally:
            walk.reset(token)

    @torch.no_grad()
    def check(self, device: torch.device) -> None:
        """Walk two short texts of different lengths, each by itself and both jointly, and compare. Code that lets one
        row depend on another, or on the cache's length, shows here. To be called once, before :meth:`forward`.

        Raises:
            JointError: the results differ, or the model's cache is of an unknown kind.
        """
        model, vocabulary = self._model, self._model.config.get_text_config().vocab_size
        texts = [torch.arange(length, device=device)[None] * 7 % vocabulary for length in (4, 6)]
        token = torch.full((1, 1), 1, device=device)
        alone, caches = [], []
        for text in texts:
            cache = model(input_ids=text, use_cache=True).past_key_values
            if isinstance(reason := structure(cache), str):
                raise JointError(reason)
            caches.append(copy.deepcopy(cache))
            output = model(input_ids=token, past_key_values=cache, use_cache=True)
            if output.keys() - {"logits", "past_key_values"}:
                raise JointError("its model has other results than logits")
            alone.append(output.logits)
        model.config._attn_implementation = NAME
        joint = self.cache(caches)
        positions = torch.tensor([[text.shape[1]] for text in texts], device=device)
        together = self.forward(joint, [None, None], torch.cat([token, token]), positions).logits
        for row, expected in enumerate(alone):
            if error := joint.errors.get(row):
                raise error
            tolerance = 1e-4 if expected.dtype is torch.float32 else 0.05
            if (together[row] - expected[0]).abs().max() > tolerance * expected.abs().max():
                raise JointError("its model gives other results for several rows")


def _check(model: Any) -> None:
    """Raise JointError for models that cannot be walked jointly."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise JointError("its model is no decoder of transformers")
    if not model._supports_attention_backend:
        raise JointError("its model has attention code of its own")
    if model.config._attn_implementation not in INNER:
        raise JointError(f"its model's attention is {model.config._attn_implementation}")
    if any(isinstance(module, VirtExperts) and module.by_place for module in model.modules()):
        raise JointError("its experts take rows in an order of their own")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if "dynamic" in str(rope) or "longrope" in str(rope):
        raise JointError("its positions depend on the longest text of a batch")
