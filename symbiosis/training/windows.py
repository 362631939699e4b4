"""Token-level fine-tuning: a training step in windows of s tokens, with the gradients of the whole sequence.

After FlexLLM, section 6.1 and algorithm 2. Only attention connects the tokens of a sequence, and it is causal: a window
reads the keys and values of the windows before it, and sends gradients back to them.

* The forward pass runs from left to right and keeps only keys and values, for all windows but the last.
* The backward pass runs from right to left. Each window runs forward again, now with a graph, against the cached keys
  and values. Gradients for earlier positions are added up in the cache (ΔKV of algorithm 2). A window's backward adds
  them to its own gradients (:class:`Extend`).

The graph of one window is alive at a time. FlexLLM keeps pruned activations of all windows instead, and saves the
second forward pass; ``docs/decisions/0009-windows.md`` compares the costs.

Keys and values are kept in a ``transformers`` cache, so every model works that keeps nothing else of the past.

Legend: B batch; T tokens of the whole sequence; s of a window; H key-value heads; D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer
from transformers.loss.loss_utils import ForCausalLMLoss

from symbiosis.errors import UsageError
from symbiosis.module_state import modes_kept
from symbiosis.training.pruning import pruned
from symbiosis.training.text_length import depends_on_length

_IGNORED = -100
_TRIED = 8
"""Tokens of the text that a model is tried with."""
_CLOSE = 0.1
"""Largest difference of logits in the trial, relative to them. Rounding makes some, above all where a router is nearly
undecided; reading later tokens made 0.19 to 0.27 in four models."""


def check_window(window: object) -> None:
    """Raise UsageError unless a window is a whole number of tokens, 1 or more."""
    if type(window) is not int or window < 1:
        raise UsageError(f"window is {window!r}; give a whole number of tokens, 1 or more")


def tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens in a row of a batch.

    Raises:
        UsageError: the batch has neither token ids nor embeddings, or they have no rows of tokens, or are empty.
    """
    for name, shape in (("input_ids", ["batch", "tokens"]), ("inputs_embeds", ["batch", "tokens", "width"])):
        inputs = batch.get(name)
        if isinstance(inputs, torch.Tensor):
            if inputs.ndim < len(shape) or 0 in inputs.shape[:2]:
                raise UsageError(
                    f"{name} is {list(inputs.shape)}; to be run in windows it must be [{', '.join(shape)}], with a row "
                    "and a token in it at least"
                )
            return inputs.shape[1]
    raise UsageError(f"a batch of {', '.join(batch)} has no tokens to be run in windows; leave `window` out")


class Extend(torch.autograd.Function):
    """Maps new keys (or values) [B, H, s, D] to all that a window attends to, [B, H, first:end, D] of the cache."""

    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, past: Past, first: int, begin: int, end: int) -> torch.Tensor:
        ctx.past, ctx.first, ctx.begin, ctx.end = past, first, begin, end
        ctx.extended = lambda: past.between(first, end)
        return past.between(first, end)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        earlier = ctx.begin - ctx.first
        own = gradient[..., earlier:, :]
        later = ctx.past.gradients
        if later is not None:  # ΔKV of later windows
            own = own + later[..., ctx.begin : ctx.end, :]
        if earlier:
            ctx.past.send(gradient[..., :earlier, :], ctx.first)
        return own, None, None, None, None


class Past:
    """Keys, or values, of one layer for the whole sequence, [B, H, T, D], and their gradients from later windows."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._values: torch.Tensor | None = None
        self._filled = 0
        self._prefixed = False
        self.gradients: torch.Tensor | None = None
        """[B, H, T less the last window, D], once the last window has run backward."""

    def between(self, first: int, end: int) -> torch.Tensor:
        assert self._values is not None
        return self._values[..., first:end, :]

    def extend(self, new: torch.Tensor, first: int, begin: int) -> torch.Tensor:
        """Store the keys (or values) of a window, and return all that it attends to."""
        end = begin + new.shape[-2]
        if self._values is None:
            self._values = new.detach().new_empty(*new.shape[:-2], self._length, new.shape[-1])
        if self._filled < end:
            self._values[..., begin:end, :] = new.detach()
            self._filled = end
        if not torch.is_grad_enabled() or not (new.requires_grad or self._prefixed):
            return self.between(first, end)
        if not new.requires_grad:
            new = new.detach().requires_grad_()  # a prefix needs its gradient even if no adapter is below
        extended: torch.Tensor = Extend.apply(new, self, first, begin, end)  # type: ignore[no-untyped-call]
        return extended

    def begin_with(self, prefix: torch.Tensor, length: int) -> None:
        """Fill the first ``length`` positions with a trainable prefix [B, H, length, D] (or its end)."""
        self._prefixed = True
        self.extend(prefix.detach(), 0, length - prefix.shape[-2])

    def send(self, gradient: torch.Tensor, first: int) -> None:
        """Add a window's gradient for positions before it."""
        end = first + gradient.shape[-2]
        if self.gradients is None:  # the last window comes first, and reaches furthest
            self.gradients = gradient.new_zeros(*gradient.shape[:-2], end, gradient.shape[-1])
        self.gradients[..., first:end, :] += gradient


class WindowLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a cache that can be positioned at any window of the sequence."""

    def __init__(self, length: int, sliding: int | None) -> None:
        super().__init__()
        self.is_sliding = sliding is not None
        self._sliding = sliding
        self.position = 0
        """Number of tokens before the window that runs next."""
        self._keys, self._values = Past(length), Past(length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        first, begin = self._first(), self.position
        self.position += key_states.shape[-2]
        return self._keys.extend(key_states, first, begin), self._values.extend(value_states, first, begin)

    def begin_with(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Put a trainable prefix before the sequence."""
        self._keys.begin_with(keys, length)
        self._values.begin_with(values, length)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return ΔK and ΔV so far, for all positions before the last window."""
        return self._keys.gradients, self._values.gradients

    def _first(self) -> int:
        return 0 if self._sliding is None else max(self.position - self._sliding + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first()
        return self.position - first + query_length, first

    def get_seq_length(self) -> int:
        return self.position

    def get_max_length(self) -> int:
        return -1 if self._sliding is None else self._sliding


class WindowedStep:
    """The forward and backward passes of one batch in windows; see :func:`symbiosis.training.step.training_step`.

    Call :meth:`fill_cache` for every window but the last, from left to right; then, from the last to the first,
    :meth:`loss` and backward from it. Random numbers are those of one forward pass from left to right.

    Args:
        model: a causal language model of ``transformers``, with PEFT or without, in training mode.
        batch: ``input_ids`` [B, T] (or ``inputs_embeds`` [B, T, width]), ``labels`` [B, T], and optionally
            ``attention_mask`` [B, T], ``position_ids`` [B or 1, T], ``token_type_ids`` [B, T], ``num_items_in_batch``,
            and options of the model that are not tensors.
        window: s, less than T.
        prune: keep fewer activations (:mod:`symbiosis.training.pruning`).

    Raises:
        UsageError: the model, its adapter or the batch cannot be run in windows; the message says why.
    """

    def __init__(self, model: Any, batch: Mapping[str, Any], window: int, prune: bool) -> None:
        self._model = model
        self._core = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._prune = prune
        _check_model(model, self._core, batch)
        self._batch = dict(batch)
        self._labels, length = self._take_labels()
        self._windows = [(begin, min(begin + window, length)) for begin in range(0, length, window)]
        self._before = 0
        if (prompt := _prompt(model)) is not None:
            self._before = prompt.num_virtual_tokens
            model._adjust_prompt_learning_kwargs(prompt, kwargs=self._batch)  # positions come after the prefix
        positions = self._batch.get("position_ids")
        seen = max(self._before + length, 0 if positions is None else int(positions.max()) + 1)
        if (most := depends_on_length(self._core.config)) is not None and seen > most:
            raise UsageError(
                f"with more than {most} tokens, the attention of {type(self._core).__name__} depends on the length of "
                f"the text, which has {seen}, so it cannot be run in windows; leave `window` out"
            )
        self._of_images = [module for module in self._core.modules() if "rope_deltas" in vars(module)]
        self._cache = _cache(self._core, self._before + length)
        self._prefix: list[tuple[WindowLayer, torch.Tensor, torch.Tensor]] = []
        self._embeds: torch.Tensor | None = self._batch.get("inputs_embeds")
        if self._embeds is not None:  # what has computed them runs backward once
            self._batch["inputs_embeds"] = self._embeds.detach().requires_grad_(self._embeds.requires_grad)
        self._device = self._labels.device
        self._states: list[tuple[torch.Tensor, ...]] = []
        self._after: tuple[torch.Tensor, ...] | None = None
        self._accepts_logits_to_keep = "logits_to_keep" in inspect.signature(self._core.forward).parameters

    def __len__(self) -> int:
        return len(self._windows)

    @torch.no_grad()
    def try_model(self) -> None:
        """Compare the beginning of a text in windows with the same tokens as a whole, once for each model and adapter.

        Raises:
            UsageError: the results differ. Tokens depend on later ones, or the loss is not that of next tokens.
        """
        types = self._batch.get("token_type_ids")
        case = _adapters(self._model, self._core), types is not None and bool(types.any())
        if _tried.get(self._core) == case:
            return
        names = [name for name in ("input_ids", "inputs_embeds") if self._batch.get(name) is not None]
        text = {name: self._batch[name][:1, :_TRIED] for name in names}
        size = min(_TRIED, self._windows[-1][1])
        count = torch.arange(size, device=self._device)[None]
        if types is not None:
            text["token_type_ids"] = (count < 3 * size // 4) * types.max()
        labels = count % self._core.config.get_text_config().vocab_size
        state = _random_state(self._device)
        with modes_kept(self._model):
            self._model.eval()
            whole = self._model(**text, labels=labels, return_dict=True)
            step = WindowedStep(self._model, {**text, "labels": labels}, (size + 1) // 2, prune=False)
            step.fill_cache(0)
            logits = torch.cat([step._forward(index, {}).logits for index in range(len(step))], 1)
        _set_random_state(self._device, state)
        if not (logits - whole.logits).float().norm() <= _CLOSE * whole.logits.float().norm():
            raise UsageError(
                f"a token's results in {type(self._core).__name__} depend on later tokens, so it cannot be run in "
                "windows; leave `window` out"
            )
        if not math.isclose(step._loss_of(0, size, whole.logits), whole.loss, rel_tol=1e-3):
            raise UsageError(_OTHER_LOSS.format(type(self._core).__name__))
        _tried[self._core] = case

    def fill_cache(self, index: int) -> None:
        """Run a window forward for its keys and values only."""
        if index == 0 and self._before:
            self._put_prefix()
        self._states.append(_random_state(self._device))
        options = {"logits_to_keep": 1} if self._accepts_logits_to_keep else {}
        with torch.no_grad():
            self._forward(index, options)

    def loss(self, index: int) -> torch.Tensor:
        """Run a window forward and return its part of the loss. Windows go from the last to the first; the backward of
        one must run before the next call."""
        if self._after is None:
            loss = self._window_loss(index)
            self._after = _random_state(self._device)
        else:
            _set_random_state(self._device, self._states[index])
            loss = self._window_loss(index)
            _set_random_state(self._device, self._after)
        return loss

    def rest(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors of a trainable prefix, and trainable embeddings, with their gradients, for a last backward
        after all windows."""
        tensors, gradients = [], []
        if self._embeds is not None and self._embeds.requires_grad:
            tensors.append(self._embeds)
            gradients.append(self._batch["inputs_embeds"].grad)
        for layer, *prefix in self._prefix:
            for tensor, gradient in zip(prefix, layer.gradients(), strict=True):
                if gradient is not None:
                    tensors.append(tensor)
                    gradients.append(gradient[..., self._before - tensor.shape[-2] : self._before, :])
        return tensors, gradients

    def _put_prefix(self) -> None:
        """Have PEFT compute the keys and values of a trained prefix, once for all windows."""
        made = self._model.get_prompt(self._labels.shape[0])
        for layer, prefix in zip(self._cache.layers, made.layers, strict=False):
            if isinstance(layer, WindowLayer) and prefix.is_initialized:
                layer.begin_with(prefix.keys, prefix.values, self._before)
                self._prefix.append((layer, prefix.keys, prefix.values))

    def _window_loss(self, index: int) -> torch.Tensor:
        with pruned() if self._prune else contextlib.nullcontext():
            return self._loss_of(*self._windows[index], self._forward(index, {}).logits)

    def _loss_of(self, begin: int, end: int, logits: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._core.loss_function(
            logits=logits,
            labels=None,
            vocab_size=logits.shape[-1],
            num_items_in_batch=self._items,
            shift_labels=self._labels[:, begin:end].contiguous(),
        )
        return loss

    def _forward(self, index: int, options: dict[str, Any]) -> Any:
        begin, end = self._windows[index]
        inputs = dict(self._batch)
        for name in _SLICED:
            if inputs.get(name) is not None:
                inputs[name] = inputs[name][:, begin:end]
        mask = inputs.get("attention_mask")
        if mask is not None:
            inputs["attention_mask"] = torch.cat([mask.new_ones(len(mask), self._before), mask[:, :end]], 1)
        for layer in self._cache.layers:
            layer.position = self._before + begin
        # PEFT would add its prefix in each forward pass, so the model inside is called.
        model = self._core if self._before else self._model
        with _without_shifts(self._of_images):
            output = model(**inputs, past_key_values=self._cache, use_cache=True, return_dict=True, **options)
        if any(isinstance(layer, WindowLayer) and layer.position != self._before + end for layer in self._cache.layers):
            raise UsageError(
                f"{type(self._core).__name__} does not put all keys and values into the given cache, so it "
                "cannot be run in windows; leave `window` out"
            )
        return output

    def _take_labels(self) -> tuple[torch.Tensor, int]:
        """Return the next token of each position [B, T], and T. Remove labels from the batch."""
        batch = self._batch
        labels = batch.pop("labels", None)
        if labels is None:
            raise UsageError(f"a batch of {', '.join(batch)} has no labels; they are needed to run it in windows")
        inputs = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
        if not isinstance(inputs, torch.Tensor) or labels.shape != inputs.shape[:2]:
            raise UsageError(
                f"labels are {list(labels.shape)}; to be run in windows a batch has input_ids (or inputs_embeds) and "
                "labels of the same batch and tokens"
            )
        self._items = batch.pop("num_items_in_batch", None)
        for name, value in batch.items():
            if name in _OURS and value not in (None, _OURS[name]):
                raise UsageError(f"{name}={value!r} cannot be combined with `window`, which sets it; leave it out")
            if not isinstance(value, torch.Tensor):
                continue
            if name not in (*_SLICED, "attention_mask"):
                raise UsageError(f"{name} cannot be cut into windows; leave it, or `window`, out")
            if value.ndim < 2 or value.shape[1] != labels.shape[1] or (name == "attention_mask" and value.ndim != 2):
                raise UsageError(
                    f"{name} is {list(value.shape)}; to be cut into windows it must be [batch, tokens], with "
                    f"{labels.shape[1]} tokens as the labels"
                )
        for name in _OURS:
            batch.pop(name, None)
        positions = batch.get("position_ids")
        if positions is not None and batch.get("attention_mask") is None and (positions.diff(dim=1) != 1).any():
            raise UsageError(
                "position_ids start anew within a row, as packed texts do; such rows are one text each to a model that "
                "has a cache, so leave `window` out or give each text a row of its own"
            )
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        mask, attention = batch.get("attention_mask"), self._core.config._attn_implementation
        if mask is not None and attention != "sdpa" and ((following != _IGNORED) & (mask == 0)).any():
            # A padding token may have nothing to attend to. Eager attention then takes the mean of the whole row.
            raise UsageError(
                f"a padding token is followed by a label, and {attention} attention reads all tokens of the row there, "
                "later ones too; to run in windows, give the first token after padding the label -100"
            )
        if self._items is None:
            self._items = (following != _IGNORED).sum()
        return following, labels.shape[1]


_SLICED = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
_OURS: dict[str, Any] = {
    "past_key_values": None,
    "use_cache": True,
    "return_dict": True,
    "logits_to_keep": 0,
    "ignore_index": _IGNORED,
}


_tried: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()
"""Models that give the same results in windows, each with its adapters, and whether token types were in use."""


def _adapter(model: Any) -> Any:
    """Return the configuration of the active adapter, or None."""
    return model.active_peft_config if hasattr(model, "get_base_model") else None


def _adapters(model: Any, core: Any) -> list[Any]:
    """Return the configurations of all active adapters, also of those that ``core.add_adapter`` has added."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # here, because a provider needs no PEFT

    known = getattr(core, "peft_config", {})
    layers = [each for each in core.modules() if isinstance(each, BaseTunerLayer) and not each.disable_adapters]
    names = sorted({name for layer in layers for name in layer.active_adapters} & known.keys())
    first = _adapter(model)
    return [*([] if first is None else [first]), *(known[name] for name in names if known[name] is not first)]


@contextlib.contextmanager
def _without_shifts(modules: list[Any]) -> Iterator[None]:
    """Run a block without the ``rope_deltas`` of modules, as Qwen-VL has them. They are those of the latest image, and
    shift the positions of every text in a cache."""
    kept = [module.rope_deltas for module in modules]
    try:
        for module in modules:
            module.rope_deltas = None
        yield
    finally:
        for module, shifts in zip(modules, kept, strict=True):
            module.rope_deltas = shifts


def _check_model(model: Any, core: Any, batch: Mapping[str, Any]) -> None:
    name = type(core).__name__
    for config in _adapters(model, core):
        kind = getattr(config.peft_type, "value", config.peft_type)
        whole = kind in _WHOLE or (config.is_prompt_learning and kind != "PREFIX_TUNING")
        if whole or any(getattr(config, option, None) is not None for option in _WHOLE_OPTIONS):
            raise UsageError(
                f"this configuration of {kind} uses the sequence as a whole, so it cannot be run in "
                "windows; leave `window` out"
            )
    if any(getattr(module, "gradient_checkpointing", False) for module in core.modules()):
        raise UsageError(
            "gradient checkpointing disables the cache that windows need, and windows recompute anyway; call "
            "model.gradient_checkpointing_disable(), or leave `window` out"
        )
    if getattr(core.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
        raise UsageError(
            "NEFTune's noise depends on the length of the whole sequence; leave `window` out, or neftune_noise_alpha"
        )
    config = core.config
    if "past_key_values" not in inspect.signature(core.forward).parameters or config.is_encoder_decoder:
        raise UsageError(
            f"{name} takes no cache of keys and values, so it cannot be run in windows; leave `window` out"
        )
    router_loss = batch.get("output_router_logits") or getattr(config.get_text_config(), "output_router_logits", False)
    if core.loss_function is not ForCausalLMLoss or router_loss:
        raise UsageError(_OTHER_LOSS.format(name))


_OTHER_LOSS = "the loss of {} is not the mean over next tokens that windows add up to; leave `window` out"
# Adaption prompts have attention of their own. AdaLoRA and Shadow add to the loss. X-LoRA and Lily weigh by all tokens.
_WHOLE = ("ADALORA", "ADAPTION_PROMPT", "LILY", "SHADOW", "XLORA")
# aLoRA looks for its tokens, and VeLoRA projects on the mean of all tokens. MonteCLoRA, and PVeRA with a seed, draw one
# noise for all tokens, from generators of their own.
_WHOLE_OPTIONS = ("alora_invocation_tokens", "velora_config", "monteclora_config", "generator_seed")


def _prompt(model: Any) -> Any:
    """Return the configuration of the PEFT method if it puts tokens of its own before the sequence, otherwise None."""
    config = _adapter(model)
    return config if config is not None and config.is_prompt_learning else None


def _cache(core: Any, length: int) -> Any:
    """Return a cache like that of ``generate``, with layers that can be positioned at any window."""
    layers: list[Any] = []
    for layer in DynamicCache(config=core.config).layers:
        kind = type(layer)
        if kind is DynamicLayer or kind is SlidingLayer:
            layers.append(WindowLayer(length, layer.sliding_window if kind is SlidingLayer else None))
        elif kind.__name__ == "DummyLayer":  # it reads the cache of another layer
            layers.append(layer)
        else:
            raise UsageError(
                f"{type(core).__name__} keeps more of the past than keys and values ({kind.__name__}), so it "
                "cannot be run in windows; leave `window` out"
            )
    return Cache(layers=layers)


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def _set_random_state(device: torch.device, state: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
