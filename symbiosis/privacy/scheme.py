"""The base class of privacy schemes: it wraps a client's channel and connects to further executors.

A scheme holds options and may serve several clients. Its :meth:`Scheme.begin` makes a
:class:`~symbiosis.privacy.masks.Mask` for one client, which masks and unmasks rows.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.registry import make_transport, transport_options
from symbiosis.core.terms import Terms
from symbiosis.core.transport import Channel, Transport
from symbiosis.privacy.amplitude import DEFAULT_SCALE, Amplitudes, scale_for
from symbiosis.privacy.channel import MaskedChannel
from symbiosis.privacy.masks import Mask, SendCall
from symbiosis.privacy.own_weights import OwnWeights, own_weights
from symbiosis.privacy.typical_sizes import TypicalSizes

_NOT_INHERITED = ("key", "insecure")
"""Transport options that say which peer is trusted. They hold for the address that they were given for only."""


class Scheme(ABC):
    """A privacy scheme (:class:`symbiosis.core.privacy.Privacy`) that masks rows with noise."""

    name: str
    scale: float | None = None
    """Ratio of the noise's amplitude to the rms of the largest row."""
    accuracy: float | None = None
    """Largest error of results, given instead of a scale; see :func:`symbiosis.privacy.amplitude.scale_for`."""
    model: str | Path | nn.Module | None = None
    """The public base model, for schemes that have the tenant compute with it: a folder, a hub id or a model."""
    options: Mapping[str, Any] = {}
    """Transport options for further executors, where they differ from those of the client."""

    def further_addresses(self, address: str) -> Sequence[str]:
        """Return addresses of executors that a client of ``address`` uses as well."""
        return ()

    def load(self, channel: Channel) -> OwnWeights | None:
        """Return the weights of the tenant's own model, if the scheme has one. Loading them may take long."""
        return None if self.model is None else own_weights(self.model, channel, self.name)

    @abstractmethod
    def begin(self, channels: Sequence[Channel], send: SendCall) -> Mask:
        """Return the mask of one client.

        Args:
            channels: the channel to the client's executor, then those to further executors.
            send: sends calls of the scheme itself to the client's executor.

        Raises:
            PrivacyError: the scheme does not work with these executors.
        """

    def amplitudes_for(self, channel: Channel, typical: TypicalSizes | None = None) -> Amplitudes:
        """Return the amplitudes of a client of the executor that a channel leads to.

        Raises:
            PrivacyError: the accuracy leaves no room for noise at the width and dtype of this model.
        """
        linear = [spec for spec in channel.layers if spec.linear] or list(channel.layers)
        widest = max(max(spec.in_features, spec.out_features) for spec in linear)
        dtype = linear[0].dtype
        return Amplitudes(scale_for(self.name, self.scale, self.accuracy, dtype, widest), typical, dtype)

    async def wrap(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        channels = [channel]
        with ExitStack() as stack:  # closes what was opened if anything fails
            for further in self.further_addresses(address):
                transport = self._transport(further, options)
                channels.append(await transport.connect(further, _further_name(channel), terms))
                stack.callback(channels[-1].close)
            loaded = await asyncio.to_thread(self.load, channel)  # begin finds the weights while this name keeps them
            masked = MaskedChannel(channels, self.begin, asyncio.get_running_loop())
            del loaded
            stack.pop_all()
            return masked

    def wrap_blocking(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        channels = [channel]
        with ExitStack() as stack:
            for further in self.further_addresses(address):
                transport = self._transport(further, options)
                channels.append(transport.connect_blocking(further, _further_name(channel), terms))
                stack.callback(channels[-1].close)
            masked = MaskedChannel(channels, self.begin)
            stack.pop_all()
            return masked

    def _set_size(self, scale: float | None, accuracy: float | None, default: float = DEFAULT_SCALE) -> None:
        scale_for(self.name, scale, accuracy, torch.float64)  # raises if a value is out of range
        self.scale = default if scale is None and accuracy is None else scale
        self.accuracy = accuracy

    def _describe_size(self) -> str:
        return f"scale={self.scale:g}" if self.accuracy is None else f"accuracy={self.accuracy:g}"

    def _transport(self, address: str, options: Mapping[str, Any]) -> Transport:
        """Return the transport to a further executor.

        It gets the scheme's own options and those of the client's that it takes, but for :data:`_NOT_INHERITED`.
        """
        known = transport_options(address)
        shared = {name: value for name, value in options.items() if name in known and name not in _NOT_INHERITED}
        return make_transport(address, **{**shared, **self.options})


def _further_name(channel: Channel) -> str:
    """Return the name of the client at a further executor.

    It differs from the client's own name. If both addresses lead to one executor, the error is then about that, and not
    about a name that is taken.
    """
    return f"{channel.client[:100]}-elsewhere"
