"""The interface of privacy schemes, which mask a client's rows before they leave it (:mod:`symbiosis.privacy`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from symbiosis.core.requests import Key
from symbiosis.core.terms import Terms
from symbiosis.core.transport import Channel


@runtime_checkable
class Preparing(Protocol):
    """A channel that masks rows, and can compute masks ahead of time."""

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Compute masks for these keys."""

    def prepare_blocking(self, keys: Iterable[Key]) -> None:
        """Compute masks for these keys, for synchronous code."""

    async def wait_closed(self) -> None:
        """Wait until what the masks used is released, once the channel was closed on an event loop."""


@runtime_checkable
class Privacy(Protocol):
    """A way to mask a client's rows. One object may serve several clients; each gets its own noise."""

    name: str

    async def wrap(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        """Return a channel that masks all rows that go over ``channel``; for coroutines.

        Args:
            channel: the channel to ``address``. The caller closes it if this method fails.
            address: address of the executor.
            terms: the client's terms, for channels to further executors.
            options: the client's transport options, for channels to further executors.

        Raises:
            PrivacyError: these executors cannot be used with this scheme.
        """

    def wrap_blocking(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        """Return a masking channel for synchronous code; see :meth:`wrap`."""


async def masked(
    scheme: Privacy | None, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]
) -> Channel:
    """Return a channel that masks all rows that go over ``channel``, or ``channel`` if there is no scheme. If the
    scheme fails, ``channel`` is closed. The arguments are those of :meth:`Privacy.wrap`."""
    if scheme is None:
        return channel
    try:
        return await scheme.wrap(channel, address, terms, options)
    except BaseException:
        channel.close()
        raise


def masked_blocking(
    scheme: Privacy | None, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]
) -> Channel:
    """Do what :func:`masked` does, for synchronous code."""
    if scheme is None:
        return channel
    try:
        return scheme.wrap_blocking(channel, address, terms, options)
    except BaseException:
        channel.close()
        raise
