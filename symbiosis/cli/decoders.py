"""Models that `symbiosis finetune` and `symbiosis generate` can be used with."""

from __future__ import annotations

from typing import Any

from symbiosis.errors import UsageError


def check_decoder(model: Any) -> None:
    """Raise UsageError for a model that does not continue a text token by token."""
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UsageError(
            f"the model is a {type(model).__name__}, which does not continue texts; use it from Python "
            "(symbiosis.open_model)"
        )
