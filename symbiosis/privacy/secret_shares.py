"""Each row split in two that are asked of two executors, who do not collude.

x = s₁ + s₂ with s₁ uniform in ±A: either share alone is noise, and the results add up to that of x. Nothing has to be
computed ahead. Everything is put on a grid of 24 bits (53 for fp64) first, so that s₁ + s₂ is x to the last bit: sums
that are rounded finer than their noise show the last bits of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from symbiosis.core.protocols import Channel
from symbiosis.core.requests import Call, Kind
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import scale_for
from symbiosis.privacy.keystream import BITS, Keystream
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.scheme import Scheme

__all__ = ["SecretShares"]

Results = tuple[torch.Tensor, ...]


class SecretShares(Scheme):
    """Each row is split additively between two executors of the same base model.

    Args:
        addresses: of the two; the client connects to one of them.
        with_: another way to say it: the address of the other one.
        scale: how far the shares are above the rows.
        accuracy: the relative error of results to aim at, instead of a scale.

    Raises:
        PrivacyError: these are not two different addresses, or a value means nothing.
    """

    name = "secret-shares"

    def __init__(
        self,
        addresses: Sequence[str] = (),
        with_: str | None = None,
        scale: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        self.scale = scale_for(self.name, scale, accuracy)
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise PrivacyError(f"{self.name}: addresses are {addresses!r}; give a list of two: [address1, address2]")
        if (with_ is None) == (not addresses) or (addresses and len(addresses) != 2):
            raise PrivacyError(
                f"{self.name}: rows are split between two executors that do not collude; give both addresses "
                f"({self.name}:with=address2 on the command line)"
            )
        if len(set(addresses)) < len(addresses):
            raise PrivacyError(f"{self.name}: {', '.join(addresses)}: an executor that has both shares has the rows")
        self._addresses = tuple(addresses)
        self._with = with_

    def __repr__(self) -> str:
        return f"{self.name}:scale={self.scale:g}, {self._with or ' '.join(self._addresses)}"

    def elsewhere(self, address: str) -> Sequence[str]:
        if self._with is not None:
            if self._with == address:
                raise PrivacyError(f"{self.name}: {address} is the executor's own address; give that of another")
            return (self._with,)
        if address not in self._addresses:
            raise PrivacyError(
                f"{self.name}: the client is connected to {address}, which is none of {', '.join(self._addresses)}"
            )
        return tuple(other for other in self._addresses if other != address)

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Shares:
        return Shares(channels)


class Shares:
    """The shares of one client."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._stream = Keystream()
        if len({channel.identity().weights for channel in channels}) > 1:
            raise PrivacyError("secret-shares: these executors serve different base models, or other layers of one")
        self._check_apart()

    def _check_apart(self) -> None:
        """An address may lead to the very executor that another one leads to, also after it was restarted."""
        instances = [channel.identity().instance for channel in self._channels]
        if len(set(instances)) < len(instances):
            raise PrivacyError(
                "secret-shares: two of the addresses lead to the same executor, which would have all shares of a row"
            )

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        self._check_apart()
        step = amplitude * 2.0 ** (1 - BITS[asked.dtype])
        share = self._stream.uniform(x.shape[0], asked.width, asked.dtype).mul(amplitude)
        rest = x.mul(1 / step).round_().mul_(step).sub_(share.to(x.device))
        share = share.to(self._channels[1].device)
        return Masked((Call(asked.key, kind, (rest,)), Call(asked.effects, kind, (share,))), (), _unmask)

    def prepare(self, asked: Asked) -> Future[Any] | None:
        return None

    def close(self) -> None:
        pass


def _unmask(answers: Sequence[Results]) -> Results:
    first, second = answers
    return tuple([torch.add(y, z.to(y.device)) for y, z in zip(first, second, strict=True)])
