"""One model on several executors, each of which serves some of its base layers.

The descriptions of their shares are merged into that of the whole model. A client has a channel to each executor, and a
call goes to the one that serves its layers. The client is in a walk at one executor at a time: the others do not wait
for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from symbiosis.core.requests import Call, LayerSpec, Results
from symbiosis.core.share import Resident, block_of, fingerprint_of, layers_of
from symbiosis.core.transport import Channel, Check, Identity
from symbiosis.errors import RefusedError, RequestError, ShareError
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.share import common_share
from symbiosis.transports.threads import ThreadCalls

_NOT_HASHED = ("fingerprint", "name")
_OF_A_PART = ("layers", "layer_weights", "weights", "fingerprint", "order", "name")
"""Entries of a description in which executors of one model may differ."""


def checked(address: str, description: Mapping[str, Any]) -> str:
    """Return the fingerprint in the description of a share.

    Raises:
        ShareError: the description does not match its fingerprint, which may come from another executor.
    """
    fingerprint = description.get("fingerprint")
    try:
        found = fingerprint_of({name: value for name, value in description.items() if name not in _NOT_HASHED})
    except (TypeError, ValueError, RecursionError) as error:
        raise ShareError(f"what {address} serves cannot be read: {error!r}"[:500]) from error
    if found != fingerprint:
        raise ShareError(
            f"the description of the model at {address} does not match its fingerprint; another version of symbiosis "
            "may run there"
        )
    return found


def merge(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description of a whole model.

    Args:
        parts: addresses of executors with different fingerprints, and what they serve.

    Raises:
        RefusedError: they serve different models, one layer is served by two of them, or a block is divided.
        GapError: some layers are not served.
        ShareError: a description is malformed.
    """
    (first, one), *others = parts.items()
    for address, other in others:
        if differ := [name for name in {*one, *other} - {*_OF_A_PART} if one.get(name) != other.get(name)]:
            raise _different(first, address, min(differ), one, other)
    try:
        if "order" not in one and not others:
            return dict(one)
        return _merged(parts)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ShareError(f"what {', '.join(parts)} serve cannot be read: {error!r}"[:500]) from error


class GapError(RefusedError):
    """No executor serves some layers of a model."""


def _merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    served: dict[str, tuple[str, list[Any], str]] = {}
    blocks: dict[str, str] = {}
    one = next(iter(parts.values()))
    for address, part in parts.items():
        for layer, weights in zip(part["layers"], part["layer_weights"], strict=True):
            name = layer[1]
            if name in served:
                if weights != served[name][2]:
                    raise _different(served[name][0], address, "layer_weights", parts[served[name][0]], part)
                raise RefusedError(
                    f"{name} is served at {served[name][0]} and at {address}, which do not serve the same layers; give "
                    "two executors the same layers, or no layer in common"
                )
            served[name] = address, layer, weights
            block = block_of(name)
            if blocks.setdefault(block, address) != address:
                raise RefusedError(f"{block} is divided between {blocks[block]} and {address}; serve blocks whole")
    order = one.get("order")
    if order is None or any(part.get("order") != order for part in parts.values()):
        raise RefusedError(f"{', '.join(parts)} serve different models: they divide them into different base layers")
    if missing := [name for name in order if name not in served]:
        raise GapError(f"no executor of {', '.join(parts)} serves {len(missing)} base layers: {_shown(missing)}"[:2000])
    merged = {name: value for name, value in one.items() if name not in _OF_A_PART}
    merged["layers"] = [[index, *served[name][1][1:]] for index, name in enumerate(order)]
    merged["layer_weights"] = [served[name][2] for name in order]
    merged["weights"] = fingerprint_of(merged["layer_weights"])
    merged["fingerprint"] = fingerprint_of(merged)
    return merged | {"name": one["name"]}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f", …, {names[-1]}" if len(names) > 2 else "")


def _different(first: str, other: str, entry: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> RefusedError:
    named = f"{one.get('name')}, {two.get('name')}"[:200]
    return RefusedError(f"{first} and {other} serve different models ({named}): their {entry.replace('_', ' ')} differ")


class PartsChannel:
    """A client's channels to the executors that together serve one model.

    Args:
        channels: a channel to each executor; the first one has the tensors of the client's share.
        description: of the whole model; see :func:`merge`.
        loop: the event loop of the channels; None for channels of synchronous code.

    Raises:
        RefusedError: the executors take tensors on different devices.
    """

    def __init__(
        self,
        channels: Sequence[AsyncChannel | BlockingChannel],
        description: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        first = channels[0]
        self.client, self.device, share = first.client, first.device, first.share
        assert not isinstance(share, Resident)
        if len({channel.device for channel in channels}) > 1:
            raise RefusedError(f"these executors take tensors on {' and '.join(str(each.device) for each in channels)}")
        self.layers: Sequence[LayerSpec] = layers_of(description)
        self.share = common_share(description, share.tensors, share.tokenizer)
        places = {spec.name: (channel, spec.layer) for channel in channels for spec in channel.layers}
        self._places = [places[spec.name] for spec in self.layers]
        self._channels = tuple(channels)
        self._weights = str(description["weights"])
        self._sent: dict[Call, tuple[Channel, Call]] = {}
        self._moving = threading.Lock()
        self._in_walk = False
        self._at: Channel | None = None
        """Where the client is in a walk. Threads of synchronous code may walk at once."""
        self._threads = None if loop is None else ThreadCalls(loop, self.send, self.cancel)

    def identity(self) -> Identity:
        return Identity(",".join(channel.identity().instance for channel in self._channels), self._weights)

    def before_return(self, check: Check) -> None:
        for channel in self._channels:
            channel.before_return(lambda identity: check(identity._replace(weights=self._weights)))

    def _forwarded(self, call: Call) -> tuple[Channel, Call]:
        """Return where a call goes, and the call as it is sent there. The client's walk goes on there."""
        try:
            places = [self._places[layer] for layer in call.key.layers]
        except IndexError:
            raise RequestError(
                f"a call asks for layers {call.key.layers}; there are {len(self.layers)}, counted from 0"
            ) from None
        channel = places[0][0]
        if any(other is not channel for other, _ in places):
            raise RequestError(f"layers {call.key.layers} are at several executors; ask for each of them")
        if self._in_walk and channel is not self._at:
            with self._moving:
                self._leave()
                channel.begin_walk()
                self._at = channel
        key = call.key._replace(layers=tuple([layer for _, layer in places]))
        return channel, Call(key, call.kind, call.tensors, call.joint)

    def send(self, call: Call) -> asyncio.Future[Results]:
        channel, sent = self._forwarded(call)
        reply: Any = channel.send(sent)
        self._sent[call] = channel, sent
        # A task that is cancelled cancels the reply; this runs before the task calls cancel, which then finds nothing.
        reply.add_done_callback(lambda done: self.cancel(call) if done.cancelled() else self._sent.pop(call, None))
        return reply  # type: ignore[no-any-return]

    def call(self, call: Call) -> Results:
        if self._threads is not None:
            return self._threads.call(call)
        channel, sent = self._forwarded(call)
        return channel.call(sent)

    def flush(self) -> None:
        for channel in self._channels:
            channel.flush()

    def cancel(self, call: Call) -> None:
        if (sent := self._sent.pop(call, None)) is not None:
            sent[0].cancel(sent[1])

    def interrupt(self, error: BaseException) -> None:
        if self._threads is not None:
            self._threads.interrupt(error)

    def begin_walk(self) -> None:
        for channel in self._channels:
            channel.check_open()  # no part of a walk is done in vain, and a joint walk changes no cache
        self._in_walk = True

    def end_walk(self) -> None:
        with self._moving:
            self._in_walk = False
            self._leave()

    def _leave(self) -> None:
        at, self._at = self._at, None
        if at is not None:
            at.end_walk()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
