"""What the scheduler knows of its clients: their terms, their walks, and which of them are thinking."""

from __future__ import annotations

from dataclasses import dataclass

from symbiosis.core.terms import Terms

STOPPED_S = 1.0
"""Seconds without a request after which a client no longer counts as thinking, for example in a debugger."""


@dataclass(slots=True)
class ClientState:
    """One client. Only :class:`Clients` changes ``thinking`` and ``since``."""

    terms: Terms
    local: bool
    """Whether the client computes in the executor's process."""
    in_walk: bool = False
    open: int = 0
    """Requests not yet answered, queued or running."""
    thinking: bool = False
    """Whether the client is in a walk with nothing outstanding, and has not stopped."""
    since: float = 0.0
    """Time at which it began to think, in seconds."""
    asked: bool = True
    """Whether the client has sent a request since it last counted as thinking because it began a walk."""
    passed: int = 0
    """Number of batches that passed over requests of its present walk, or of the latest part of a long one."""
    held: float = 0.0
    """Seconds by which waits without a limit have delayed this walk since a batch first passed over one of its
    requests."""
    requests: int = 0
    """Requests since these two were 0."""

    def begin_traversal(self) -> None:
        """Note that the client begins to walk through the model anew."""
        self.passed, self.held, self.requests = 0, 0.0, 0


class Clients:
    """The clients that have joined, by name, and how many of them are thinking.

    Attributes:
        states: each client.
        thinking: the number of clients that are thinking.
        look_at: time before which no client can have stopped, in seconds.
    """

    def __init__(self) -> None:
        self.states: dict[str, ClientState] = {}
        self.thinking = 0
        self.look_at = 0.0

    def begin_walk(self, state: ClientState, now: float) -> None:
        """Note that a client without an outstanding request has begun a walk. A client of another process counts as
        thinking for the first such walk after a request only: it could otherwise delay other clients without limit."""
        if state.asked or state.local:
            state.asked = False
            self.begin_thinking(state, now)

    def begin_thinking(self, state: ClientState, now: float) -> None:
        """Note that a client in a walk has nothing outstanding from now on."""
        if not state.thinking:
            state.thinking = True
            self.thinking += 1
        state.since = now

    def end_thinking(self, state: ClientState) -> None:
        """Note that a client has sent a request, is idle, or has stopped."""
        if state.thinking:
            state.thinking = False
            self.thinking -= 1

    def drop_stopped(self, now: float, after_s: float) -> None:
        """Stop counting clients as thinking that have been silent for so many seconds. Looks at all clients."""
        self.look_at = now + STOPPED_S
        for state in self.states.values():
            if state.thinking and state.since + after_s <= now:
                self.end_thinking(state)
            elif state.thinking:
                self.look_at = min(self.look_at, state.since + STOPPED_S)

    def validate(self) -> None:
        """Assert that the counts are right; for tests."""
        for name, state in self.states.items():
            assert state.in_walk or not state.thinking, f"{name!r} counts as thinking outside a walk"
            assert not (state.open and state.thinking), f"{name!r} counts as thinking with an open request"
        assert self.thinking == sum(state.thinking for state in self.states.values()), "thinking count is wrong"
