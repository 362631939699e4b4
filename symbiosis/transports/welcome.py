"""What an executor tells a client that it lets in, checked, and the model that is built from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from symbiosis.core.protocols import Identity
from symbiosis.core.share import Hollow
from symbiosis.errors import WireError
from symbiosis.transports.wire import Limits

__all__ = ["Welcome"]

_hollows: weakref.WeakValueDictionary[tuple[str, str], Hollow] = weakref.WeakValueDictionary()
"""The models of this process, so that its clients of one executor share their tensors."""


class Welcome:
    """Checks the content of a WELCOME."""

    def __init__(self, content: Any) -> None:
        if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
            raise WireError("the executor's welcome is not understood")
        self.content: dict[str, Any] = content[0]
        share, tokenizer = self.content.get("share"), self.content.get("tokenizer")
        if not isinstance(share, dict) or not isinstance(share.get("fingerprint"), str):
            raise WireError("the executor's welcome does not describe a model")
        if not isinstance(tokenizer, dict) or not all(
            isinstance(name, str) and isinstance(data, bytes) and "/" not in name and name not in ("", ".", "..")
            for name, data in tokenizer.items()
        ):
            raise WireError("the executor's welcome has no sound tokenizer files")
        self.share: dict[str, Any] = share
        self.tokenizer: dict[str, bytes] = tokenizer
        self.limits = Limits.of(self.content.get("limits"))

    @property
    def fingerprint(self) -> str:
        """Tells whether it is still the same model after a reconnect."""
        return str(self.share["fingerprint"])

    @property
    def identity(self) -> Identity:
        """Which executor it is, and of which base layers."""
        return Identity(str(self.content.get("instance", "")), str(self.share.get("weights", "")))

    def known(self, device: torch.device) -> Hollow | None:
        """The model, if this process has made it before and still uses it."""
        return _hollows.get((self.fingerprint, str(device)))

    def hollow(self, tensors: Callable[[], Mapping[str, torch.Tensor]], device: torch.device) -> Hollow:
        """The model without its base layers; made once a process."""
        key = self.fingerprint, str(device)
        hollow = _hollows.get(key)
        if hollow is None:
            hollow = _hollows[key] = Hollow(self.share, tensors(), device)
        return hollow
