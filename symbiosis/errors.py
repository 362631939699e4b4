"""Every error that symbiosis raises on purpose, in one tree.

The three branches answer the first question anyone asks: whose fault is it?

* :class:`UsageError`: the caller's. The message names the value and what to do instead.
* :class:`PeerError`: the other side ended the conversation, in good order.
* :class:`BrokenError`: something failed that should not have: a policy, a base layer, a connection.
"""

from __future__ import annotations

__all__ = [
    "BrokenError",
    "CannotWaitError",
    "ClientClosedError",
    "ExecutorClosedError",
    "LayerError",
    "PeerError",
    "PlaceholderError",
    "PolicyError",
    "RequestError",
    "SplitError",
    "SymbiosisError",
    "UnknownNameError",
    "UsageError",
]


class SymbiosisError(Exception):
    """Root of every error raised by symbiosis itself."""


class UsageError(SymbiosisError):
    """The caller asked for something that cannot be done; the message says what to do instead."""


class CannotWaitError(UsageError):
    """A VirtLayer was called where it can neither suspend a fiber nor block a thread."""


class PlaceholderError(UsageError):
    """Something wants the weights of a base layer, which a client does not have."""


class RequestError(UsageError):
    """A request does not fit the layer it names: dtype, width, rows, pass or layer index."""


class SplitError(UsageError):
    """A model cannot be split into base layers and a client's share as asked."""


class UnknownNameError(UsageError):
    """No policy or transport of this name is built in or installed."""


class PeerError(SymbiosisError):
    """The other side ended the conversation in good order."""


class ClientClosedError(PeerError):
    """The client was closed while, or before, this call needed it."""


class ExecutorClosedError(PeerError):
    """The executor was shut down while, or before, this call needed it."""


class BrokenError(SymbiosisError):
    """Something failed that should not have."""


class LayerError(BrokenError):
    """A base layer failed while it ran a batch; the cause is chained."""


class PolicyError(BrokenError):
    """A batching policy raised, or made a decision that the scheduler must refuse."""
