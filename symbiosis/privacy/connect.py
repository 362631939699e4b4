"""Put a privacy scheme between a client and its channel."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from symbiosis.core.protocols import Channel, Privacy, Transport
from symbiosis.core.registry import make_transport
from symbiosis.privacy.channel import MaskedChannel

__all__ = ["masked", "masked_blocking"]


async def masked(channel: Channel, privacy: Privacy, address: str, options: Mapping[str, Any]) -> Channel:
    """``channel``, which leads to ``address``, with rows masked; ``options`` are those of its transport."""
    channels = [channel]
    try:
        for other in privacy.elsewhere(address):
            channels.append(await _transport(other, options).connect(other, channel.client))  # noqa: PERF401
        return MaskedChannel(channels, privacy, asyncio.get_running_loop())
    except BaseException:
        _close(channels)
        raise


def masked_blocking(channel: Channel, privacy: Privacy, address: str, options: Mapping[str, Any]) -> Channel:
    """The same for synchronous code."""
    channels = [channel]
    try:
        for other in privacy.elsewhere(address):
            channels.append(_transport(other, options).connect_blocking(other, channel.client))  # noqa: PERF401
        return MaskedChannel(channels, privacy)
    except BaseException:
        _close(channels)
        raise


def _transport(address: str, options: Mapping[str, Any]) -> Transport:
    """For an executor elsewhere: with those of the options that its transport has."""
    known = inspect.signature(type(make_transport(address))).parameters
    return make_transport(address, **{name: value for name, value in options.items() if name in known})


def _close(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()
