"""Models whose attention depends on the length of the text as a whole."""

from __future__ import annotations

from typing import Any

_ROPES = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the longest text of a batch."""


def depends_on_length(config: Any) -> int | None:
    """Return the number of tokens from which on a token's results depend on how long the text is, also by tokens after
    it; None if they never do.

    Args:
        config: a configuration of ``transformers``, possibly of a model with a language model inside.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    found = [
        rope.get("original_max_position_embeddings") or text.max_position_embeddings
        for rope in (ropes, *ropes.values())  # of the model, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in _ROPES
    ]
    if (kept := getattr(text, "keep_window_size", None)) is not None:  # Doge chooses this many tokens to attend to
        found.append(kept)
    return min(found, default=None)
