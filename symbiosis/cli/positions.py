"""The longest sequence of a model that has a table of positions."""

from __future__ import annotations

import itertools
from typing import Any

from symbiosis.errors import UsageError

_OFFSETS = range(3)
"""Rows of such a table that are no positions. OPT has two."""


def positions_of(model: Any, adapter: Any = None) -> int | None:
    """Return the largest number of tokens in a sequence; None for a model that computes positions (rotary ones, ALiBi).

    Args:
        model: the opened model.
        adapter: a PEFT configuration, whose virtual tokens take positions too.

    Raises:
        UsageError: the virtual tokens take all positions.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    tables = itertools.chain(model.named_parameters(), model.named_buffers())
    if not any(_is_table(name, table.shape, limit) for name, table in tables):
        return None
    virtual = getattr(adapter, "num_virtual_tokens", None) or 0
    if limit - virtual < 2:
        raise UsageError(f"the model has {limit} positions, too few for {virtual} virtual tokens and a text")
    return limit - virtual


def _is_table(name: str, shape: tuple[int, ...], limit: int) -> bool:
    # XGLM's buffer "weights" grows when a sequence is longer.
    named = ("pos" in name or "wpe" in name) and not name.endswith(".weights")
    return named and len(shape) == 2 and shape[0] - limit in _OFFSETS
