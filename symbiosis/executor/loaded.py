"""The model of an executor before its base layers are taken out: given as a module, or loaded from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.share import dtype_name
from symbiosis.errors import UsageError
from symbiosis.executor.launch import Launch, ShardSettings
from symbiosis.executor.loading import Check, dtype_of, load_model, load_tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model, where it came from, and where its base layers go."""

    model: nn.Module
    device: str | torch.device | None
    """Device that base layers are moved to; None if they stay where they are."""
    dtype: torch.dtype | None = None
    """Precision that base layers get when they are taken out; None for that of the model."""
    tokenizer: Callable[[], Any] | None = None
    """Loads the model's tokenizer."""
    launch: Launch | None = None
    """The shards that hold the model together, if there are several."""

    @classmethod
    def given(cls, model: Any, device: str | torch.device | None, dtype: torch.dtype | str | None) -> Loaded:
        """Return a module, converted in place.

        Raises:
            UsageError: it is no module, or torch has no such precision.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is {model!r}, not a module; for a folder or hub id use Executor.from_pretrained")
        dtype = dtype_of(dtype)
        try:
            return cls(model if dtype is None else model.to(dtype), device)
        except ValueError as error:  # transformers converts no quantized model
            raise UsageError(f"dtype is {dtype}, but the model cannot be converted: {error}") from error

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        model_class: type[Any] | None,
        device: str | torch.device | None,
        dtype: torch.dtype | str | None,
        options: dict[str, Any],
        *,
        check: Check | None,
        partly: bool,
        shards: int,
    ) -> Loaded:
        """Load a model.

        Args:
            source, model_class, device, dtype, options: as for :meth:`symbiosis.Executor.from_pretrained`.
            check: as for :func:`~symbiosis.executor.loading.load_model`.
            partly: whether some of the base layers are served elsewhere. Then nothing is converted before they have
                been taken out, so that their weights are never read.
            shards: number of shards.

        Raises:
            UsageError: there is no such model, or an argument cannot be told to the other shards.
        """
        named = None if dtype == "auto" else dtype_of(dtype)
        tokenizer = partial(load_tokenizer, source, **options)
        if shards == 1:
            if dtype is not None and not partly:
                options, named = {**options, "dtype": named or dtype}, None
            return cls(load_model(source, model_class, check, **options), device, named, tokenizer)
        launch = Launch(shards, settings(source, model_class, device, dtype, options))
        if launch.rank:
            raise UsageError("this is not the first process of torchrun; call Executor.run_shard here")
        return cls(launch.settings.load(check), launch.settings.device_of(0), named, tokenizer, launch)

    def close(self) -> None:
        """End the other shards."""
        if self.launch is not None:
            self.launch.close()


def settings(
    source: str | Path,
    model_class: type[Any] | None,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
) -> ShardSettings:
    """Return how shards load a model. Raises UsageError for what cannot be told to another process."""
    try:
        json.dumps(options)
    except TypeError as error:
        raise UsageError(f"shards are processes of their own, and {error}; leave that option out") from error
    kind = None if model_class is None else f"{model_class.__module__}.{model_class.__qualname__}"
    named = None if dtype == "auto" else dtype_of(dtype)
    short = None if named is None else dtype_name(named)
    return ShardSettings(str(source), kind, options, short, str(device or "cpu"))
