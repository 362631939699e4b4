"""What the two drivers of a client's conversation need of a transport: connectors, connections and carriers of tensors.

Each transport implements these protocols; the drivers (``channel.py``, ``blocking.py``) know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from symbiosis.core.share import Share
from symbiosis.errors import SymbiosisError
from symbiosis.transports.outstanding import Pending, Results
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import Hello, Type

__all__ = [
    "Arrived",
    "BlockingConnection",
    "BlockingConnector",
    "Carrier",
    "Connection",
    "Connector",
    "Lost",
    "Message",
    "Received",
]

Received = Callable[[Type, Sequence[Any], Sequence[Any]], None]
"""Takes a message: its type, content and raw frames."""
Lost = Callable[[SymbiosisError], None]
"""Takes the reason for which a connection has ended."""
Arrived = Callable[[Pending, Results], None]
"""Takes results that come later than their message."""


class Message(NamedTuple):
    """A message to a client, and the raw frames that came with it."""

    type: Type
    content: Sequence[Any]
    frames: Sequence[Any]


class Carrier(Protocol):
    """Moves the tensors of one connection's calls and results. The client's end."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors in calls and results."""

    @property
    def most_bytes(self) -> int:
        """Largest call, with its results, in bytes."""

    def put(self, pending: Pending) -> Sequence[Any] | None:
        """Hand over a call's tensors. Return CALL and the raw frames that go with it; None if there is no room yet.

        After None, try again when a call was answered or :meth:`control` was called.

        Raises:
            UsageError: the executor has no room for this call.
        """

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        """Return a call's results, [rows, width] each; None if they arrive later, by the callback of the connection.

        Raises:
            WireError: the frames do not fit the layer table.
        """

    def free(self, pending: Pending) -> None:
        """Give back the memory of a call that was answered."""

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        """Take a message of a type in :data:`symbiosis.transports.conversation.CARRIED`.

        Raises:
            WireError: the message is malformed, or not for this carrier.
        """


class _Connection(Protocol):
    """The client's end of one connection, from its WELCOME to its end."""

    @property
    def welcome(self) -> Welcome: ...
    @property
    def carrier(self) -> Carrier: ...
    @property
    def share(self) -> Share | None:
        """The client's share of the model; None on a connection that replaces another."""

    def close(self) -> None:
        """Close the connection. Has no effect the second time."""


class Connection(_Connection, Protocol):
    """A connection on an event loop."""

    def start(self, received: Received, lost: Lost, arrived: Arrived) -> None:
        """Begin to call the callbacks, ``lost`` only once. They are not called after :meth:`close`."""

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and its frames without waiting. Has no effect on a connection that has ended."""

    def silent(self) -> bool:
        """Return whether the other side shows no sign of life, as far as the transport can tell."""


class BlockingConnection(_Connection, Protocol):
    """A connection for threads that block, one at a time."""

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and its frames.

        Raises:
            OSError, ConnectionLostError: the connection has ended.
        """

    def receive(self) -> Message | None:
        """Return the next message; None if none came for some time (at most 5 s).

        Raises:
            OSError, ConnectionLostError: the connection has ended.
            WireError: the message is malformed.
        """

    def interrupt(self) -> None:
        """Make :meth:`receive` on another thread return or raise soon."""

    def abandon(self) -> None:
        """In a forked child process: give up the connection and leave it to the parent process."""


class Connector(Protocol):
    """Opens connections to one executor on an event loop."""

    async def join(self, hello: Hello, again: bool) -> Connection:
        """Connect and join. ``again``: the client has its share of the model already.

        Raises:
            ConnectionLostError: no executor answers.
            RefusedError: the executor does not admit this client.
        """


class BlockingConnector(Protocol):
    """Opens connections to one executor for threads that block."""

    def join(self, hello: Hello, again: bool) -> BlockingConnection:
        """Connect and join; see :meth:`Connector.join`."""
