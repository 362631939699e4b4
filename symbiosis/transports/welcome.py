"""The WELCOME message, with which an executor admits a client: its checks, and the share that it describes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import Share, layers_of
from symbiosis.core.transport import Identity, Look
from symbiosis.errors import WireError
from symbiosis.transports import wire
from symbiosis.transports.wire import Limits, Type

__all__ = ["Welcome"]

_shares: weakref.WeakValueDictionary[str, Share] = weakref.WeakValueDictionary()
"""The shares that clients of this process use, by fingerprint, so that they have their tensors in common."""


class Welcome:
    """Checks the content of a WELCOME."""

    def __init__(self, content: Any) -> None:
        if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
            raise WireError("the executor sent a malformed WELCOME")
        self.content: dict[str, Any] = content[0]
        share, tokenizer = self.content.get("share"), self.content.get("tokenizer")
        if not isinstance(share, dict) or not isinstance(share.get("fingerprint"), str):
            raise WireError("the executor's WELCOME does not describe a model")
        if not isinstance(tokenizer, dict) or not all(
            isinstance(name, str) and isinstance(data, bytes) and "/" not in name and name not in ("", ".", "..")
            for name, data in tokenizer.items()
        ):
            raise WireError("the executor's WELCOME has malformed tokenizer files")
        self.description: dict[str, Any] = share
        self.tokenizer: dict[str, bytes] = tokenizer
        self.limits = Limits.of(self.content.get("limits"))

    @classmethod
    def read(cls, type_: Type, content: Sequence[Any], address: str) -> Welcome:
        """Read the first message of the executor at ``address``.

        Raises:
            SymbiosisError: the executor does not admit the client; why.
            WireError: the message is no welcome.
        """
        if type_ is Type.ENDED:
            raise wire.error_of(*content[:2])
        if type_ is not Type.WELCOME:
            raise WireError(f"the executor at {address} answered HELLO with {type_.name}")
        return cls(content)

    def look(self, type_: Type, content: Sequence[Any], address: str) -> Look:
        """Return what the executor shows to a peer that has not joined, given its answer to STATUS.

        Raises:
            WireError: the message is no status.
        """
        if type_ is not Type.STATUS or not content or not isinstance(content[0], dict):
            raise WireError(f"the executor at {address} answered STATUS with {type_.name}")
        return Look(content[0], self.description, self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; the same after a reconnect if the model is the same."""
        return str(self.description["fingerprint"])

    @property
    def identity(self) -> Identity:
        """Identity of the executor and of its base layers."""
        return Identity(str(self.content.get("instance", "")), str(self.description.get("weights", "")))

    @property
    def layers(self) -> list[LayerSpec]:
        """The layer table.

        Raises:
            ShareError: it is malformed.
        """
        return layers_of(self.description)

    def known(self) -> Share | None:
        """Return the share, if a client of this process uses it already."""
        return _shares.get(self.fingerprint)

    def share(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Share:
        """Return the share, the same object for all clients of this process. ``tensors`` is called if it is new."""
        share = self.known()
        if share is None:
            share = _shares[self.fingerprint] = Share(self.description, tensors(), self.tokenizer)
        return share
