"""The first messages of each connection, without I/O: HELLO, WELCOME, then the client's share or the executor's status.

==============  =======================  ===============================================================
the client      the executor             the client then
==============  =======================  ===============================================================
HELLO           WELCOME                  is done if it has the share, from before or for another client
\\               WELCOME, descriptors     maps the share's file, whose descriptor is the last, and is done
SHARE           SHARE with a chunk       asks for the next chunk, or is done
STATUS          STATUS                   is done; only a peer that has sent no name asks this
any             ENDED                    raises the executor's reason
==============  =======================  ===============================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from symbiosis.core.share import Share
from symbiosis.core.transport import Look
from symbiosis.errors import WireError
from symbiosis.transports import wire
from symbiosis.transports.share import CHUNK, Progress, ReceivedShare, Welcome, tensors_in
from symbiosis.transports.wire import Hello, Type

ANSWER_WITHIN_S = 30.0
"""Seconds within which each of the executor's first messages must come: in a long batch it does not answer sooner."""
CHUNKS_UNDER_WAY = 16
"""Chunks of the share that a client asks for ahead, so that the line is not idle during a round trip."""

Message = tuple[Type, Sequence[Any], Sequence[Any]]
"""A message to a client: its type, its content, and what came with it: its payload if it has one, or descriptors."""


class Joined(NamedTuple):
    """What a peer has from the first messages of a connection."""

    welcome: Welcome
    share: Share | None = None
    """The client's share of the model; None for a client that joins again, and for a peer that only looks."""
    look: Look | None = None
    """What the executor shows; None for a client that joins."""


Joining = Generator[list[bytes], Message, Joined]
"""The first messages: yields what to send, takes each message that comes."""


def joining(address: str, hello: Hello, again: bool, progress: Progress | None = None) -> Joining:
    """Return the first messages of a connection.

    Args:
        address: the executor's.
        hello: the client; one without a name looks at the executor and does not join.
        again: whether the client has its share already.
        progress: called as chunks of the share come.

    Raises:
        SymbiosisError: the executor's reason for not admitting the client.
        WireError: a message is malformed, or is not the one that is due.
    """
    content, descriptors = _due(Type.WELCOME, (yield [wire.pack_hello(hello)]), address)
    welcome = Welcome(content)
    if hello.name is None:
        status, _ = _due(Type.STATUS, (yield [wire.pack(Type.STATUS)]), address)
        return Joined(welcome, look=welcome.look(status))
    if again:
        return Joined(welcome)
    if (known := welcome.known()) is not None:
        return Joined(welcome, known)
    if descriptors:
        return Joined(welcome, welcome.share(tensors_in(descriptors[-1])))
    with contextlib.closing(ReceivedShare(welcome.content.get("share_bytes"))) as file:
        asked = 0
        while file.done < file.size:
            until = min(file.size, file.done + CHUNKS_UNDER_WAY * CHUNK)
            requests = [wire.pack(Type.SHARE, start) for start in range(asked, until, CHUNK)]
            asked += len(requests) * CHUNK
            content, attached = _due(Type.SHARE, (yield requests), address)
            if len(attached) != 1:
                raise WireError(f"the executor at {address} sent a chunk of its share without a payload")
            file.add(wire.read_id(content), attached[0])
            if progress is not None:
                progress(file.done, file.size)
        return Joined(welcome, welcome.share(file.tensors()))


def exchange(messages: Joining, send: Callable[[bytes], object], receive: Callable[[], Message]) -> Joined:
    """Send and receive the first messages of a connection, and return what they bring. Blocks.

    Args:
        messages: from :func:`joining`, whose errors are raised.
        send: sends a message.
        receive: returns the next message. What ``send`` and ``receive`` raise ends the exchange.
    """
    with contextlib.closing(messages):
        try:
            requests = next(messages)
            while True:
                for request in requests:
                    send(request)
                requests = messages.send(receive())
        except StopIteration as done:
            joined: Joined = done.value
            return joined


def _due(due: Type, message: Message, address: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the content of a message of the type that is due, and what came with it."""
    type_, content, attached = message
    if type_ is Type.ENDED:
        raise wire.error_of(*content[:2])
    if type_ is not due:
        raise WireError(f"the executor at {address} sent {type_.name} where {due.name} is due")
    return content, attached
