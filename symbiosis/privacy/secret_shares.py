"""Each row is split into two shares for two executors that do not collude. Nothing is computed ahead of time.

x = s₁ + s₂, and the results of the two shares add up to that of x. Shares are drawn in one of two ways:

- With the public weights, shares are wrapped like one-time pads (:mod:`symbiosis.privacy.wrapped`). Each share is
  *exactly* uniform, whatever x is. An executor sees only the amplitude, a power of two.
- Without them, s₁ = x/2 + g and s₂ = x/2 − g, with Gaussian g of standard deviation σ = A / √3. A share then carries
  ‖x‖² / 8σ² nats of information about a row. That is very little for one row, and adds up over the rows of a text that
  the provider guesses. ``docs/decisions/0033-gaussian-shares.md`` says why the noise is not uniform.

Rows are first rounded to a grid of 24 bits (53 in fp64), so that s₁ + s₂ is exactly the rounded x. A finer sum would
reveal the last bits of x.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import Call, Results
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel, Identity
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import DEFAULT_SCALE, WRAPPED_SCALE, Amplitudes
from symbiosis.privacy.keystream import BITS, Keystream, grid_step
from symbiosis.privacy.masks import Mask, MaskedKey, MaskedRows, SendCall
from symbiosis.privacy.own_weights import OwnWeights
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wrapped import Wrapped, unwrap, wrap

_REACH = 4.0
"""Largest number of a Gaussian share in units of the amplitude, whose σ is 0.58."""


class SecretShares(Scheme):
    """Each row is split additively between two executors of the same base model.

    Args:
        with_: address of the other executor; the client connects to one itself.
        model: the public base model: a folder, a hub id or a model. With it shares reveal nothing of a row but the
            amplitude; without it they reveal a little more.
        scale: ratio of the amplitude of the shares to the rms of the largest row. With a model it is an upper limit,
            and a larger one hides nothing more.
        accuracy: largest error of results, instead of a scale, relative to the result of the request's largest row.
            Without a model it may be up to 16 times that after larger rows; see
            :func:`~symbiosis.privacy.amplitude.scale_for`.
        options: transport options for the other executor, where they differ from those of the client. Two providers
            need ``{"key": "other.secret"}`` (``options.key=other.secret`` on the command line).

    Raises:
        PrivacyError: an option is wrong, or, when a client opens, the other executor is its own.
    """

    name = "secret-shares"

    def __init__(
        self,
        with_: str = "",
        model: str | Path | nn.Module | None = None,
        scale: float | None = None,
        accuracy: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._set_size(scale, accuracy, DEFAULT_SCALE if model is None else WRAPPED_SCALE)
        if not with_ or not isinstance(with_, str):
            raise PrivacyError(
                f"{self.name}: rows are split between two executors that do not collude, and with is {with_!r}; give "
                f"the address of the other one: {self.name}:with=ADDRESS"
            )
        if options is not None and not isinstance(options, Mapping):
            raise PrivacyError(f"{self.name}: options are {options!r}; give a mapping: {{'key': 'other.secret'}}")
        self.options = dict(options or {})
        self.model = model
        self._with = with_

    def __repr__(self) -> str:
        return f"{self.name}:{self._describe_size()}, {self._with}"

    def further_addresses(self, address: str) -> Sequence[str]:
        if self._with == address:
            raise PrivacyError(f"{self.name}: {address} is the executor's own address; give that of another one")
        return (self._with,)

    def begin(self, channels: Sequence[Channel], send: SendCall) -> Shares:
        own = self.load(channels[0])
        return Shares(channels, own, self.amplitudes_for(channels[0], None if own is None else own.typical))


class Shares(Mask):
    """The shares of one client."""

    def __init__(self, channels: Sequence[Channel], own: OwnWeights | None, amplitudes: Amplitudes) -> None:
        if len({channel.identity().weights for channel in channels}) > 1:
            raise PrivacyError("secret-shares: these executors serve different base models, or other layers of one")
        self.amplitudes = amplitudes
        self._own = own
        self._second_device = channels[1].device
        self._stream = Keystream()
        self._instances: list[set[str]] = [set() for _ in channels]
        """Instances of executors that each channel has led to so far."""
        self._instances_lock = threading.Lock()
        for number, channel in enumerate(channels):
            channel.before_return(partial(self._check_instance, number))
            self._check_instance(number, channel.identity())

    def _check_instance(self, number: int, executor: Identity) -> None:
        """Refuse an executor that another channel has led to at any time.

        Such an executor has, or had, the other shares of the requests that are outstanding.
        """
        instances = set(executor.instance.split(","))
        with self._instances_lock:
            if any(instances & met for other, met in enumerate(self._instances) if other != number):
                raise PrivacyError(
                    "secret-shares: two of the addresses lead to the same executor, which would have all shares of a "
                    "row; nothing was sent there. Give the addresses of two executors"
                )
            self._instances[number] |= instances

    def mask(self, key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
        wrapped = None
        if self._own is None:
            first, second = self._gaussian(x, amplitude, key.dtype)
        else:
            noise = self._stream.integers(x.shape[0], key.width, key.dtype)
            first, wrapped = wrap(key, x, noise, amplitude)
            second = noise.neg().to(key.dtype).mul_(amplitude * grid_step(key.dtype))
        second = second.to(self._second_device)
        calls = Call(key.key, kind, (first,)), Call(key.effects, kind, (second,))
        return MaskedRows(calls, (), partial(self._unmask, key, wrapped))

    def _gaussian(self, x: torch.Tensor, amplitude: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x/2 + g and x/2 − g on one grid."""
        step = _REACH * amplitude * grid_step(dtype)
        most = 2.0 ** (BITS[dtype] - 1)  # 6.9 σ, exceeded once in 10¹¹ numbers; with x/2 the sum stays exact
        noise = self._stream.normal(x.shape[0], x.shape[1])
        if dtype is torch.float64:  # pairs of normal numbers depend on each other in steps coarser than this grid
            noise = noise.add(self._stream.normal(x.shape[0], x.shape[1]), alpha=2.0**-20)
        noise = noise.mul(amplitude / (math.sqrt(3) * step))
        noise = noise.round_().clamp_(-most, most).to(x.device, dtype)
        total = x.mul(1 / step).round_()
        first = total.mul(0.5).floor_().add_(noise)
        second = total.sub_(first)
        return first.mul_(step), second.mul_(step)

    def _unmask(self, key: MaskedKey, wrapped: Wrapped | None, answers: Sequence[Results]) -> Results:
        first, second = answers
        results = tuple([torch.add(y, z.to(y.device)) for y, z in zip(first, second, strict=True)])
        if wrapped is not None:
            assert self._own is not None
            unwrap(self._own, key, results, wrapped)
        return results
