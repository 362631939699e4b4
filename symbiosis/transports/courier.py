"""What a transport provides for each connection of a listener: a :class:`Line`, which sends messages and ends the
connection, and a :class:`Courier`, which finds the tensors of a call and delivers its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from symbiosis.core.requests import Call, Expected, Results
from symbiosis.transports.wire import CallMessage, Type


class Line(Protocol):
    """The executor's end of one connection, as far as messages are concerned."""

    @property
    def authenticated(self) -> bool:
        """Whether the connection has shown whose it is. Other clients cannot have the names of tenants with keys."""

    def when_read(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the client has read what was sent so far, or all but 64 KiB of it; perhaps at once."""

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Has no effect when the client is gone."""

    def drop(self, why: object) -> None:
        """End the connection now."""

    def hang_up(self) -> None:
        """End the connection when the client has read what was sent, or after a second."""

    def listen(self, wanted: bool) -> None:
        """Stop feeding messages to the peer, or resume."""

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return what of the executor's status the client may see."""

    def greeted(self, name: str) -> str:
        """Note that HELLO came, and return the name under which its client joins. Raises BusyError if the tenant has
        too many connections."""


@dataclass(slots=True, eq=False)
class Admitted:
    """A call that is within the limits."""

    message: CallMessage
    expected: Expected
    incoming: int
    """Bytes of its tensors, each aligned as in an arena."""
    size: int
    """The same, with the results."""
    counted: int
    """Bytes that the executor may hold for it while it waits and runs."""
    tensors: Results = ()
    """Its matrices, where they are in memory that the client shares."""
    answers: Results = ()
    """Where its results belong, in such memory."""
    call: Call | None = None
    """None while its tensors have not arrived."""
    cancelled: bool = False
    """Whether the client has withdrawn it before they have."""


class Courier(ABC):
    """The executor's end of one connection, as far as tensors are concerned."""

    can_skip = True
    """Whether the executor can skip the tensors of a refused call without losing those of the next one."""

    @abstractmethod
    def welcome(self, joined: bool) -> dict[str, Any]:
        """Return what this transport adds to WELCOME. ``joined``: the client has joined; else it only looks. Raises
        WireError: the client does not take what comes with the welcome."""

    @abstractmethod
    def check(self, admitted: Admitted, payload: int) -> int:
        """Check where the tensors of a call are and its results belong. In shared memory, note both.

        Return how many bytes the connection keeps from then on, of its arena for instance. ``payload`` is the number of
        raw bytes that follow the message. Raises WireError: tensors or results do not fit there.
        """

    @abstractmethod
    def tensors(self, admitted: Admitted) -> Results | None:
        """Return the matrices of a call, [rows, width] each; None if they arrive later, by ``Peer.arrived``."""

    @abstractmethod
    def answer(self, admitted: Admitted, results: Results, sent: Callable[[], object]) -> None:
        """Send RESULT, with the results where the call wants them. Call ``sent`` when they take no memory here any
        more, perhaps at once."""

    def ended(self, admitted: Admitted) -> None:
        """Note, before the client is told, that a call was answered, has failed or was cancelled. The client may then
        use the places of its matrices again."""

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        """Take a message of a type that only this transport has. Return whether it is one."""
        return False

    def close(self) -> None:
        """Give up the memory of the connection."""

    def when_ended(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the memory of the connection was given up, after :meth:`close`; perhaps at once."""
        then()
