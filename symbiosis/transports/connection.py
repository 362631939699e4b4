"""Base classes that a transport gives to the drivers of a client's conversation: connections and carriers of tensors.

A transport subclasses :class:`AsyncConnection`, :class:`BlockingConnection` and :class:`Carrier`, and gives each driver
a function that joins the executor. The drivers (``channel.py``, ``blocking.py``) know nothing else of it.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from symbiosis.core.requests import Results
from symbiosis.core.share import Share
from symbiosis.errors import SymbiosisError, WireError
from symbiosis.transports.conversation import Pending
from symbiosis.transports.joining import Message
from symbiosis.transports.share import Welcome
from symbiosis.transports.wire import Hello, Type


class Receiver(Protocol):
    """The channel of a connection on an event loop."""

    def received(self, type_: Type, content: Sequence[Any], attached: Sequence[Any]) -> None:
        """Take a message."""

    def lost(self, error: SymbiosisError) -> None:
        """Take the reason for which the connection has ended. Called once."""

    def arrived(self, pending: Pending, outcome: Results | Exception) -> None:
        """Take results that come later than their message, or the error for which they cannot be taken."""


class Carrier(ABC):
    """Moves the tensors of one connection's calls and results. The client's end."""

    device = torch.device("cpu")
    """Device of the tensors in calls and results."""

    @abstractmethod
    def put(self, pending: Pending) -> Sequence[Any] | None:
        """Hand over a call's tensors. Return CALL and the parts of its payload; None if there is no room yet.

        After None, try again when a call was answered or :meth:`control` was called.

        Raises:
            UsageError: the executor has no room for this call.
        """

    @abstractmethod
    def take(self, pending: Pending, attached: Sequence[Any]) -> Results | None:
        """Return a call's results, [rows, width] each; None if they arrive later; see :meth:`start`.
        Raises WireError if the payload does not fit the layer table. The caller gets any other error, such as that of a
        lack of memory, and the connection goes on."""

    def due(self, id_: int) -> int:
        """Return the length of the payload that the RESULT of a call must have, in bytes."""
        return 0

    def free(self, pending: Pending) -> None:
        """Give back the memory of a call that was answered."""

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        """Take a message of a type in :data:`symbiosis.transports.conversation.CARRIED`. Raises WireError if the
        message is malformed, or not for this carrier."""
        raise WireError(f"the executor sent {type_.name}, which is not for this client")

    def start(self, channel: Receiver) -> None:
        """Begin to call ``arrived`` with results that come later than their message."""

    def close(self) -> None:
        """End the carrier with its connection."""


class _Connection(ABC):
    """The client's end of one connection, from its WELCOME to its end."""

    welcome: Welcome
    carrier: Carrier
    share: Share | None = None
    """The client's share of the model; None on a connection that replaces another."""

    @abstractmethod
    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and the parts of its payload."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Has no effect the second time."""


class AsyncConnection(_Connection):
    """A connection on an event loop. ``send`` does not wait, and has no effect if the connection has ended."""

    @abstractmethod
    async def attach(self) -> None:
        """Go on on the running event loop. Another thread has opened the connection."""

    @abstractmethod
    def start(self, channel: Receiver) -> None:
        """Begin to tell the channel what comes, until :meth:`close`."""

    @abstractmethod
    def moves(self) -> bool:
        """Return whether bytes have come, or fewer wait to be sent, since this method was last called."""


class BlockingConnection(_Connection):
    """A connection for threads that block, one at a time.

    If the connection has ended, ``send`` and ``receive`` raise OSError or ConnectionLostError.
    """

    @abstractmethod
    def receive(self) -> Message | None:
        """Return the next message; None if none came for some time (at most 5 s). Raises WireError if the message is
        malformed."""

    @abstractmethod
    def moves(self) -> bool:
        """Return whether bytes came during the last :meth:`receive`."""

    def interrupt(self) -> None:
        """Make :meth:`receive` on another thread return or raise soon, if it does not do so in any case."""

    def abandon(self) -> None:
        """Give up the connection in a forked child process; the parent process keeps it."""


Join = Callable[[Hello, bool], AsyncConnection]
BlockingJoin = Callable[[Hello, bool], BlockingConnection]
"""Connects and joins the executor, and blocks until then. The second argument says that the client has its share of the
model already.

Raises ConnectionLostError if no executor answers, and RefusedError if the executor does not admit this client."""


async def joined(join: Join, hello: Hello, again: bool) -> AsyncConnection:
    """Return a connection that ``join`` opens on a thread of its own. If the caller is cancelled, it is closed later.

    A pool of threads could be full of clients that wait for an executor whose own work needs the pool, and a process
    that ends would wait for its threads.
    """
    joining: Future[AsyncConnection] = Future()

    def run() -> None:
        try:
            joining.set_result(join(hello, again))
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            joining.set_exception(error)

    def abandon(joining: Future[AsyncConnection]) -> None:
        if joining.exception() is None:
            joining.result().close()

    threading.Thread(target=run, name="symbiosis-join", daemon=True).start()
    try:
        connection = await asyncio.shield(asyncio.wrap_future(joining))
    except asyncio.CancelledError:
        joining.add_done_callback(abandon)
        raise
    try:
        await connection.attach()
    except BaseException:
        connection.close()
        raise
    return connection
