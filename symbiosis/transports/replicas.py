"""Several addresses of one model: a client joins one of its executors, and another one when that is lost.

Executors may also serve different parts of the model (:mod:`symbiosis.transports.model_parts`); then a client joins one
executor for each part. A replica is an executor with the same fingerprint. Every call is self-contained, so a client
can send it to any of them. Before it joins, a client asks all replicas for their load. It prefers the busiest one that
is not crowded, whose load is below 0.5, since clients that share batches read the weights once for all of them. When
its replica is crowded and another one is not, a client moves there between two walks. Decision 0038 has the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Listener, Look, Service
from symbiosis.errors import ConnectionLostError, RefusedError, ShareError, SymbiosisError, UsageError
from symbiosis.transports.addresses import (
    PATIENCE_S,
    SHOWN_WITHIN_S,
    Addresses,
    Looks,
    Replica,
    as_symbiosis,
    fingerprint_in,
    together,
)
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.choice import C, Choice
from symbiosis.transports.connection import BlockingJoin, Join
from symbiosis.transports.conversation import MAY_RETURN
from symbiosis.transports.model_parts import GapError, PartsChannel, merge
from symbiosis.transports.wire import Hello


class Replicas:
    """Connect to executors of the same model.

    Args:
        address: their addresses, separated by commas, or where a list with an address on each line is kept:
            ``file:///path`` or ``http://host:port/path``. The list is read again before executors are chosen.
        retry: seconds for which a client that has lost an executor tries to reach any of them; 0 gives up at once.
        **options: of the transports. Each transport gets those that it has.

    Raises:
        UsageError: a transport cannot be used here, an address is there twice, an option has no valid value, or the
            file cannot be read.
    """

    def __init__(self, address: str, retry: float = 60.0, **options: Any) -> None:
        self._retry_s = retry
        self._addresses = Addresses(address, **options)

    def check(self, address: str) -> NoReturn:
        raise UsageError(
            f"{address}: an executor listens at one address of shm://, tcp:// or dist:// at a time; call listen for "
            "each (repeat --listen)"
        )

    async def listen(self, address: str, service: Service) -> Listener:
        self.check(address)

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        parts, whole, looks = await asyncio.to_thread(self._parts)
        channels: list[AsyncChannel] = []
        with ExitStack() as stack:  # closes what was opened if anything fails
            for part in parts:
                choice = Choice(self._addresses, part, looks, bool(channels), parts)
                join: Join = partial(_joined, choice, lambda one: one.transport.join(one.address))
                channel = await AsyncChannel.open(join, address, Hello(client, terms), self._retry_s, choice.better)
                channel.before_return = choice.before_return
                stack.callback(channel.close)
                channels.append(channel)
            found = _whole(channels, whole, asyncio.get_running_loop())
            stack.pop_all()
            return found

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        parts, whole, looks = self._parts()
        channels: list[BlockingChannel] = []
        with ExitStack() as stack:
            for part in parts:
                choice = Choice(self._addresses, part, looks, bool(channels), parts)
                join: BlockingJoin = partial(_joined, choice, lambda one: one.transport.join_blocking(one.address))
                hello = Hello(client, terms)
                channel = BlockingChannel(join, address, hello, self._retry_s, choice.better, choice.leave)
                channel.before_return = choice.before_return
                stack.callback(channel.close)
                channels.append(channel)
            found = _whole(channels, whole, None)
            stack.pop_all()
            return found

    def look(self, address: str) -> Look:
        """Return what an executor shows, with the description of the whole model, or of one part while another one is
        away. The entry ``replicas`` of its status has each address's status, or the ``error`` of one that does not
        answer, and under the list's own address that layers are missing. Raises what :meth:`connect` raises if no
        executor answers."""
        looks = self._looks(SHOWN_WITHIN_S)
        if not any(isinstance(look, Look) for look in looks.values()):
            looks = self._looks(None)  # in a long batch an executor does not answer sooner
        replicas = {
            replica.address: look.status if isinstance(look, Look) else {"error": str(look)}
            for replica, look in looks.items()
        }
        seen = _described(looks)
        first = next(look for look in looks.values() if isinstance(look, Look))
        try:
            return Look({"replicas": replicas}, merge(seen), first.tokenizer)
        except GapError as error:
            replicas[address] = {"error": str(error)}
            return Look({"replicas": replicas}, first.model, first.tokenizer, _why(error, looks))

    def _parts(self) -> tuple[list[str], dict[str, Any], Looks]:
        """Return the fingerprints of the model's parts, the description of the whole model, and what was seen.

        Raises:
            RefusedError: executors serve different models, or a layer is served by none of them.
            ConnectionLostError: a layer is served by none of them, and an executor does not answer.
            UsageError: an address cannot be used in this way.
        """
        looks = self._looks(PATIENCE_S)
        try:
            whole = _merge(looks)
        except ConnectionLostError:
            looks = self._addresses.looks(None)
            whole = _merge(looks)
        found = (str(fingerprint_in(look)) for look in looks.values() if isinstance(look, Look))
        return list(dict.fromkeys(found)), whole, looks

    def _looks(self, patience_s: float | None) -> Looks:
        """Return what was seen; see :meth:`Addresses.looks`. Raises UsageError if an address cannot be used in this
        way."""
        looks = self._addresses.looks(patience_s)
        for error in looks.values():
            if isinstance(error, UsageError) and not isinstance(error, ShareError):
                raise error
        return looks


def _joined(choice: Choice, join: Callable[[Replica], Callable[[Hello, bool], C]], hello: Hello, again: bool) -> C:
    """Return a connection to the first replica that can be joined. Blocks."""
    errors: list[SymbiosisError] = []
    for replica in chain(choice.candidates(), choice.with_smaller_limits(errors)):
        try:
            return choice.take(replica, join(replica)(hello, again or choice.has_share), again)
        except (SymbiosisError, OSError) as error:
            choice.failed(replica)
            errors.append(as_symbiosis(replica, error))
    raise together(errors)


def _merge(looks: Looks) -> dict[str, Any]:
    """Return the description of the whole model. Raises like :meth:`Replicas._parts`."""
    seen = _described(looks)
    try:
        return merge(seen)
    except GapError as error:
        raise _why(error, looks) from None


def _why(error: GapError, looks: Looks) -> SymbiosisError:
    """Return the error of a gap, with those of executors that may serve the missing layers."""
    if not (errors := _errors(looks)):
        return error
    why = together(errors)
    kind = ConnectionLostError if isinstance(why, MAY_RETURN) else RefusedError
    return kind(f"{error}; {why}")


def _described(looks: Looks) -> dict[str, Mapping[str, Any]]:
    """Return the description of each different model that was seen, by an address of it. Raises the errors of all
    addresses if none has answered."""
    seen: dict[object, tuple[str, Mapping[str, Any]]] = {}
    for replica, look in looks.items():
        if isinstance(look, Look):
            seen.setdefault(fingerprint_in(look), (replica.address, look.model))
    if not seen:
        raise together(_errors(looks))
    return dict(seen.values())


def _errors(looks: Looks) -> list[SymbiosisError]:
    return [look for look in looks.values() if isinstance(look, SymbiosisError)]


def _whole(
    channels: Sequence[AsyncChannel | BlockingChannel],
    whole: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop | None,
) -> Channel:
    return channels[0] if len(channels) == 1 else PartsChannel(channels, whole, loop)
