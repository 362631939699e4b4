"""Every error that symbiosis raises on purpose, in one tree.

The three branches answer the first question anyone asks: whose fault is it?

* :class:`UsageError`: the caller's. The message names the value and what to do instead.
* :class:`PeerError`: the other side ended the conversation, in good order.
* :class:`BrokenError`: something failed that should not have: a policy, a base layer, a connection.
"""

from __future__ import annotations

__all__ = [
    "BrokenError",
    "BusyError",
    "CannotWaitError",
    "ClientClosedError",
    "ConnectionLostError",
    "ExecutorClosedError",
    "LayerError",
    "PeerError",
    "PlaceholderError",
    "PolicyError",
    "PrivacyError",
    "RefusedError",
    "RequestError",
    "ShareError",
    "SplitError",
    "SymbiosisError",
    "UnknownNameError",
    "UsageError",
    "WireError",
]


class SymbiosisError(Exception):
    """Root of every error raised by symbiosis itself."""


class UsageError(SymbiosisError):
    """The caller asked for something that cannot be done; the message says what to do instead."""


class CannotWaitError(UsageError):
    """A VirtLayer was called where it can neither suspend a fiber nor block a thread."""


class PlaceholderError(UsageError):
    """Something wants the weights of a base layer, which a client does not have."""


class PrivacyError(UsageError):
    """Rows cannot be masked as asked. Nothing was sent bare."""


class RequestError(UsageError):
    """A request does not fit the layer it names: dtype, width, rows, pass or layer index."""


class ShareError(UsageError):
    """A client's share of a model cannot be made, or does not fit what is installed here."""


class SplitError(UsageError):
    """A model cannot be split into base layers and a client's share as asked."""


class UnknownNameError(UsageError):
    """No policy, transport or privacy scheme of this name is built in or installed."""


class PeerError(SymbiosisError):
    """The other side ended the conversation in good order."""


class ClientClosedError(PeerError):
    """The client was closed while, or before, this call needed it."""


class ExecutorClosedError(PeerError):
    """The executor was shut down while, or before, this call needed it."""


class RefusedError(PeerError):
    """The executor does not let this client in, or has shown it out; the message says why."""


class BusyError(RefusedError):
    """Not now: the name is in use, or there are as many clients as allowed. Later it may be otherwise."""


class BrokenError(SymbiosisError):
    """Something failed that should not have."""


class ConnectionLostError(BrokenError):
    """The executor cannot be reached, or was lost and did not come back in time."""


class WireError(BrokenError):
    """The other side sent what the wire format does not allow."""


class LayerError(BrokenError):
    """A base layer failed while it ran a batch; the cause is chained."""


class PolicyError(BrokenError):
    """A batching policy raised, or made a decision that the scheduler must refuse."""
