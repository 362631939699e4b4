"""The model that a joint walk runs: the skeleton of the base model, with the adapters of all clients of the walk."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from symbiosis.client.experts import VirtExperts
from symbiosis.client.joint.adapters import Adapted, JointLatents, adapters_of, make_joint
from symbiosis.client.joint.attention import INNER, NAME, JointCache, JointError, WalkCache, filled, structure, walk
from symbiosis.client.joint.reading import settings_of
from symbiosis.client.joint.stacks import Slot
from symbiosis.training.text_length import depends_on_length


class JointModel:
    """A skeleton that serves several clients in one walk.

    Args:
        skeleton: a skeleton in evaluation mode that no client uses.

    Attributes:
        module: the model. Nothing in it is a client's.
        settings: its configuration, as the clients' models have it.
        has_experts: whether there are banks of experts in it.
        latent: indices of the layers that keep latent vectors, and expand them for each token.
        moves_positions: whether a token's position may differ from the number of tokens before it. Some models count
            from one, and others keep by how much an image has moved the positions after it.

    Raises:
        JointError: models of this kind cannot be walked jointly.
    """

    def __init__(self, skeleton: Any) -> None:
        _check(skeleton)
        self.module: nn.Module = skeleton
        self.settings = settings_of(skeleton.config)
        self._model = skeleton
        self._inner = skeleton.config._attn_implementation
        self._layers = make_joint(skeleton)
        self._filled: list[bool] = []
        """Which layers of a cache a text fills, as :func:`filled` gives it."""
        self.has_experts = any(isinstance(module, VirtExperts) for module in skeleton.modules())
        self.latent = {module.layer_idx for module in skeleton.modules() if isinstance(module, JointLatents)}
        self.moves_positions = any(hasattr(module, "rope_deltas") for module in skeleton.modules())

    def adapters(self, clients: Sequence[tuple[Adapted, Mapping[str, Slot]]], sizes: Sequence[int]) -> dict[str, Any]:
        """Return the adapters of a walk, given each client's and its number of rows, for :meth:`seat`."""
        return adapters_of(self._layers, clients, sizes)

    def seat(self, adapters: Mapping[str, Any]) -> dict[str, Any]:
        """Take the adapters of the next walk, and return those of the last one."""
        before = {}
        for name, layer in self._layers.items():
            before[name], layer.adapters = layer.adapters, adapters.get(name)
        return before

    @contextlib.contextmanager
    def seated(self, adapters: Mapping[str, Any]) -> Iterator[None]:
        """Have these adapters inside the ``with`` block."""
        before = self.seat(adapters)
        try:
            yield
        finally:
            self.seat(before)

    def cache(
        self, caches: Sequence[Any], sizes: Sequence[int], attention: Sequence[torch.Tensor | None]
    ) -> JointCache:
        """Return the caches of the clients of a walk, n rows each, and their masks [n, L + 1] or None, as one."""
        return JointCache(caches, sizes, attention, self._inner, self.latent)

    def has_other_inputs(self, cache: Any) -> bool:
        """Return whether a cache has more than tokens, such as an image in layers of cross-attention. The model's code
        decides by the cache of one client whether it runs these layers for all."""
        found = filled(cache)
        return any(found) and found != self._filled

    def forward(self, cache: WalkCache, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return the model's output for tokens [N, 1] at positions [N, 1], or [K, N, 1] if a token has K of them."""
        token = walk.set(cache)
        try:
            return self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        finally:
            walk.reset(token)

    @torch.no_grad()
    def check(self, device: torch.device) -> list[Trial]:
        """Walk two short texts of different lengths, each by itself and both jointly, and compare. Code that lets one
        row depend on another, or on the cache's length, shows here. To be called once, before :meth:`forward`.

        Returns:
            The texts, for other ways to walk them.

        Raises:
            JointError: the results differ, or the model's cache is of an unknown kind.
        """
        model, vocabulary = self._model, self._model.config.get_text_config().vocab_size
        token, trials, caches = torch.full((1, 1), 1, device=device), [], []
        for length in (4, 6):
            ids = torch.arange(length, device=device)[None] * 7 % vocabulary
            cache = model(input_ids=ids, use_cache=True).past_key_values
            if isinstance(reason := structure(cache, 1), str):
                raise JointError(reason)
            self._filled = filled(cache)
            caches.append(copy.deepcopy(cache))
            before = copy.deepcopy(cache)
            position = torch.tensor([[length]], device=device)
            output = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True)
            if output.keys() - {"logits", "past_key_values"}:
                raise JointError("its model has other results than logits")
            trials.append(Trial(before, token, position, output.logits))
            # A client that gives no position leaves it to the model. Rows of others in a batch change the last bits.
            usual = model(input_ids=token, past_key_values=copy.deepcopy(before), use_cache=True).logits
            self.moves_positions = self.moves_positions or trials[-1].differs(usual, fp32=1e-4, others=0.01)
        model.config._attn_implementation = NAME
        joint = self.cache(caches, [1, 1], [None, None])
        tokens, positions = torch.cat([token, token]), torch.cat([trial.position for trial in trials])
        together = self.forward(joint, tokens, positions).logits
        joint.keep_states()
        for row, trial in enumerate(trials):
            if error := joint.errors.get(row):
                raise error
            trial.compare(together[row : row + 1])
        return trials


class Trial(NamedTuple):
    """A text, its next token [1, 1], and what the model gives for it in a walk of its own."""

    cache: Any
    token: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor

    def compare(self, logits: torch.Tensor) -> None:
        """Raise JointError if these logits [1, 1, vocabulary] differ by more than rounding."""
        if self.differs(logits, fp32=1e-4, others=0.05):
            raise JointError("its model gives other results for several rows")

    def differs(self, logits: torch.Tensor, *, fp32: float, others: float) -> bool:
        """Return whether logits [1, 1, vocabulary] differ by more than a part of the largest: one for fp32, and one for
        other dtypes."""
        part = fp32 if self.logits.dtype is torch.float32 else others
        return not (logits - self.logits).abs().max() <= part * self.logits.abs().max()  # of NaN, it is true, too


def _check(model: Any) -> None:
    """Raise JointError for models that cannot be walked jointly."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise JointError("its model is no decoder of transformers")
    if not any(hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in model.modules()):
        raise JointError("its model has attention code of its own")
    if model.config._attn_implementation not in INNER:
        raise JointError(f"its model's attention is {model.config._attn_implementation}")
    if any(isinstance(module, VirtExperts) and module.by_place for module in model.modules()):
        raise JointError("its experts take rows in an order of their own")
    if depends_on_length(model.config) is not None:
        raise JointError("its attention depends on the longest text of a batch")
