"""What all schemes have in common: how they come between a client and its channel."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from symbiosis.core.registry import make_transport
from symbiosis.core.terms import Terms
from symbiosis.core.transport import Channel, Transport
from symbiosis.privacy.amplitude import DEFAULT_SCALE, Levels, scale_for
from symbiosis.privacy.channel import MaskedChannel
from symbiosis.privacy.masks import Ask, Mask
from symbiosis.privacy.usual import Usual

__all__ = ["Scheme"]


class Scheme(ABC):
    """A privacy scheme (:class:`symbiosis.core.privacy.Privacy`), to be subclassed."""

    name: str
    scale: float | None = None
    """How far above the rows' own size (rms) the amplitude of the noise is."""
    accuracy: float | None = None
    """The error of results to aim at, instead; see :func:`symbiosis.privacy.amplitude.scale_for`."""

    options: Mapping[str, Any] = {}
    """Of the transport to executors elsewhere, where they differ from those of the client's own."""

    def levels_at(self, channel: Channel, usual: Usual | None = None) -> Levels:
        """The amplitudes of a client of the executor at the other end of a channel.

        Raises:
            PrivacyError: its rows leave no room for noise at this accuracy.
        """
        linear = [spec for spec in channel.layers if spec.linear] or list(channel.layers)
        widest = max(max(spec.in_features, spec.out_features) for spec in linear)
        dtype = linear[0].dtype
        return Levels(scale_for(self.name, self.scale, self.accuracy, dtype, widest), usual, dtype)

    def _aims_at(self, scale: float | None, accuracy: float | None, default: float = DEFAULT_SCALE) -> None:
        scale_for(self.name, scale, accuracy, torch.float64)  # whether they mean anything
        self.scale = default if scale is None and accuracy is None else scale
        self.accuracy = accuracy

    def _said(self) -> str:
        """The scale or accuracy, for a repr."""
        return f"scale={self.scale:g}" if self.accuracy is None else f"accuracy={self.accuracy:g}"

    def elsewhere(self, address: str) -> Sequence[str]:
        """Addresses of the executors that a client at ``address`` asks besides."""
        return ()

    def load(self, channel: Channel) -> object:
        """What :meth:`begin` needs and takes long to get; on a thread that may block. Kept until begin is done."""
        return None

    @abstractmethod
    def begin(self, channels: Sequence[Channel], ask: Ask) -> Mask:
        """For one client; ``channels`` lead to its executor and to those elsewhere.

        Raises:
            PrivacyError: these executors will not do.
        """

    async def wrap(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        channels = [channel]
        try:
            for other in self.elsewhere(address):
                transport = self._transport(other, options)
                channels.append(await transport.connect(other, _name(channel), terms))
            loaded = await asyncio.to_thread(self.load, channel)
            masked = MaskedChannel(channels, self.begin, asyncio.get_running_loop())
            del loaded
            return masked
        except BaseException:
            _close(channels)
            raise

    def wrap_blocking(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        channels = [channel]
        try:
            for other in self.elsewhere(address):
                transport = self._transport(other, options)
                channels.append(transport.connect_blocking(other, _name(channel), terms))
            return MaskedChannel(channels, self.begin)
        except BaseException:
            _close(channels)
            raise

    def _transport(self, address: str, options: Mapping[str, Any]) -> Transport:
        """For an executor elsewhere: with its own options, and those of the client's that its transport has. What says
        whom to trust is for one address only."""
        known = inspect.signature(type(make_transport(address))).parameters
        shared = {name: value for name, value in options.items() if name in known and name not in _OF_ONE_ADDRESS}
        return make_transport(address, **{**shared, **self.options})


_OF_ONE_ADDRESS = ("key", "insecure")


def _name(channel: Channel) -> str:
    """Of a client elsewhere. Another one, so that the same executor is found out, and not called busy."""
    return f"{channel.client[:100]}-elsewhere"


def _close(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()
