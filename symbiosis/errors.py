"""Every error that symbiosis raises on purpose, in one tree with three branches.

* :class:`UsageError`: the caller made a mistake. The message names the value and what to do instead.
* :class:`PeerError`: the other side ended the conversation in good order.
* :class:`BrokenError`: a policy, a base layer or a connection failed.
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
    "ShardLostError",
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
    """Code needs the weights of a base layer, which a client does not have.

    Attributes:
        layer: the layer's name, where it is known.
    """

    layer: str | None = None


class PrivacyError(UsageError):
    """Rows cannot be masked as requested. No unmasked row was sent."""


class RequestError(UsageError):
    """A request does not fit its layer: dtype, width, rows, pass or layer index."""


class ShareError(UsageError):
    """A share of a model cannot be made, or does not fit the installed version of transformers."""


class SplitError(UsageError):
    """A model cannot be split into base layers and a client's part as requested."""


class UnknownNameError(UsageError):
    """No policy, transport or privacy scheme of this name is built in or installed."""


class PeerError(SymbiosisError):
    """The other side ended the conversation in good order."""


class ClientClosedError(PeerError):
    """The client was closed before or during this call."""


class ExecutorClosedError(PeerError):
    """The executor was shut down before or during this call."""

    @classmethod
    def of(cls, address: str) -> ExecutorClosedError:
        """Return the error for the executor at an address."""
        return cls(f"the executor at {address} was shut down")


class RefusedError(PeerError):
    """The executor does not admit this client, or has disconnected it; the message says why."""


class BusyError(RefusedError):
    """The name is in use, the limit of clients is reached, or a call found no memory for 60 s. A later attempt may
    succeed."""


class BrokenError(SymbiosisError):
    """A part of the system failed."""


class ConnectionLostError(BrokenError):
    """The executor cannot be reached, or was lost and did not return in time."""


class WireError(BrokenError):
    """The other side sent a message that the wire format does not allow."""


class LayerError(BrokenError):
    """A base layer failed while it ran a batch; the cause is chained."""


class ShardLostError(BrokenError):
    """A process with a part of the base model has ended, so the executor ends too."""


class PolicyError(BrokenError):
    """A batching policy raised an error, or made a decision that the scheduler refused."""


def copied(error: BaseException) -> BaseException:
    """Return a copy of an error for another client. One object that is raised twice would join both tracebacks."""
    try:
        copy = type(error)(*error.args)
    except Exception:  # noqa: BLE001 (an error class may take other arguments)
        copy = RuntimeError(str(error))
    copy.__cause__ = error.__cause__
    return copy
