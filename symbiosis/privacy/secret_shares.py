"""Each row split in two that are asked of two executors, who do not collude. Nothing has to be computed ahead.

x = s₁ + s₂, and the results of the two add up to that of x. There are two ways to draw shares:

- With the public weights at hand, shares are wrapped like one-time pads (:mod:`symbiosis.privacy.wrapped`): each is
  *exactly* uniform, whatever x is, and all that an executor sees of x is the amplitude, a power of two.
- Without them, s₁ = x/2 + g and s₂ = x/2 − g, with Gaussian g of standard deviation σ = A / √3. Either share then says
  a little about x, ‖x‖² / 8σ² nats a row, which is next to nothing for one row, and adds up over rows for who guesses
  whole texts. Uniform noise of the same size says much more: numbers near its sharp bounds exclude guesses for certain,
  ‖x‖₁ / 2A of them in each row, and one that is sent R times is known to A/R, not A/√R.

Rows are put on a grid of 24 bits (53 for fp64) first, so that s₁ + s₂ is x to the last bit: sums that are rounded finer
than their noise show the last bits of x.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import Call
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel, Identity
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import DEFAULT_SCALE, WRAPPED_SCALE, Levels
from symbiosis.privacy.keystream import BITS, Keystream
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.own_weights import OwnWeights, own_weights
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wrapped import Turns, unwrap, wrap

__all__ = ["SecretShares"]

Results = tuple[torch.Tensor, ...]


class SecretShares(Scheme):
    """Each row is split additively between two executors of the same base model.

    Args:
        addresses: of the two; the client connects to one of them.
        with_: another way to say it: the address of the other one.
        model: the public base model, if it is at hand: a folder, a hub id, or a model. Shares are perfect with it, and
            say a little about rows without.
        options: of the transport to the other one, where they differ from the client's own: with two providers,
            ``{"key": "other.secret"}``. (``options.key=other.secret`` on the command line.)
        scale: how far the shares are above the rows. With a model, at most; a larger one hides nothing more then.
        accuracy: the error of results to aim at, instead of a scale, relative to what the largest row of a request
            comes to; without a model, after larger rows, it may be up to 16 times that, see
            :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: these are not two different addresses, or a value means nothing.
    """

    name = "secret-shares"

    def __init__(
        self,
        addresses: Sequence[str] = (),
        with_: str | None = None,
        model: str | Path | nn.Module | None = None,
        scale: float | None = None,
        accuracy: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._aims_at(scale, accuracy, DEFAULT_SCALE if model is None else WRAPPED_SCALE)
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise PrivacyError(f"{self.name}: addresses are {addresses!r}; give a list of two: [address1, address2]")
        if (with_ is None) == (not addresses) or (addresses and len(addresses) != 2):
            raise PrivacyError(
                f"{self.name}: rows are split between two executors that do not collude; give both addresses "
                f"({self.name}:with=address2 on the command line)"
            )
        if len(set(addresses)) < len(addresses):
            raise PrivacyError(f"{self.name}: {', '.join(addresses)}: an executor that has both shares has the rows")
        if options is not None and not isinstance(options, Mapping):
            raise PrivacyError(f"{self.name}: options are {options!r}; give some by name: {{'key': 'other.secret'}}")
        self.options = dict(options or {})
        self.model = model
        self._addresses = tuple(addresses)
        self._with = with_

    def __repr__(self) -> str:
        return f"{self.name}:{self._said()}, {self._with or ' '.join(self._addresses)}"

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

    def load(self, channel: Channel) -> OwnWeights | None:
        return None if self.model is None else own_weights(self.model, channel, self.name)

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Shares:
        own = self.load(channels[0])
        return Shares(channels, own, self.levels_at(channels[0], None if own is None else own.usual))


class Shares:
    """The shares of one client."""

    def __init__(self, channels: Sequence[Channel], own: OwnWeights | None, levels: Levels) -> None:
        self._channels = channels
        self.levels = levels
        self._stream = Keystream()
        if len({channel.identity().weights for channel in channels}) > 1:
            raise PrivacyError("secret-shares: these executors serve different base models, or other layers of one")
        self._met: list[set[str]] = [set() for _ in channels]
        """The executors that each channel has ever led to."""
        self._meeting = threading.Lock()
        for number, channel in enumerate(channels):
            channel.before_return(partial(self._meet, number))
            self._meet(number, channel.identity())
        self._own = own

    def _meet(self, number: int, executor: Identity) -> None:
        """Before a channel's shares go to an executor. It may be the very one that another channel leads to, or has led
        to, also after a restart: then it has, or had, the other shares of what is outstanding."""
        with self._meeting:
            if any(executor.instance in met for other, met in enumerate(self._met) if other != number):
                raise PrivacyError(
                    "secret-shares: two of the addresses lead to the same executor, which would have all shares of a "
                    "row; nothing was sent there"
                )
            self._met[number].add(executor.instance)

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        turns = None
        if self._own is None:
            first, second = self._split(x, amplitude, asked.dtype)
        else:
            noise = self._stream.integers(x.shape[0], asked.width, asked.dtype)
            first, turns = wrap(asked, x, noise, amplitude)
            second = noise.neg().to(asked.dtype).mul_(amplitude * 2.0 ** (1 - BITS[asked.dtype]))
        second = second.to(self._channels[1].device)
        calls = Call(asked.key, kind, (first,)), Call(asked.effects, kind, (second,))
        return Masked(calls, (), partial(self._unmask, asked, turns))

    def _split(self, x: torch.Tensor, amplitude: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """x/2 ± g, both on one grid."""
        step = _REACH * amplitude * 2.0 ** (1 - BITS[dtype])
        most = 2.0 ** (BITS[dtype] - 1)  # 6.9 σ, once in 10¹¹ numbers; with x/2 the sum is exact up to twice that
        noise = self._stream.normal(x.shape[0], x.shape[1])
        if dtype is torch.float64:  # what pairs of normal numbers have in common would be coarser than this grid
            noise = noise.add(self._stream.normal(x.shape[0], x.shape[1]), alpha=2.0**-20)
        noise = noise.mul(amplitude / (math.sqrt(3) * step))
        noise = noise.round_().clamp_(-most, most).to(x.device, dtype)
        total = x.mul(1 / step).round_()
        first = total.mul(0.5).floor_().add_(noise)
        second = total.sub_(first)
        return first.mul_(step), second.mul_(step)

    def _unmask(self, asked: Asked, turns: Turns | None, answers: Sequence[Results]) -> Results:
        first, second = answers
        results = tuple([torch.add(y, z.to(y.device)) for y, z in zip(first, second, strict=True)])
        if turns is not None:
            assert self._own is not None
            unwrap(self._own, asked, results, turns)
        return results

    def prepare(self, asked: Asked) -> Future[Any] | None:
        return None

    def close(self) -> None:
        pass


_REACH = 4.0
"""The largest number of a Gaussian share over the amplitude, to which it has σ = 0.58."""
