"""Channels for synchronous code: the thread that calls sends, waits for the answer and reconnects by itself."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod

import torch

from symbiosis.core.requests import Call
from symbiosis.core.transport import Check
from symbiosis.errors import (
    ClientClosedError,
    ConnectionLostError,
    ExecutorClosedError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.log import get_logger
from symbiosis.transports.backoff import MAY_RETURN, backoff

__all__ = ["BlockingChannel", "SynchronousChannel", "forked_error"]

log = get_logger(__name__)

AGAIN_S = 5.0
"""How long to try for another connection after a call was interrupted."""

Results = tuple[torch.Tensor, ...]


def forked_error(client: str) -> ClientClosedError:
    """What a forked child is told."""
    return ClientClosedError(
        f"the model of {client!r} belongs to the process that opened it, not to its forked child; open one of its own "
        "there"
    )


class SynchronousChannel:
    """What channels for synchronous code do not do."""

    def send(self, call: Call) -> asyncio.Future[Results]:
        raise UsageError("this model was opened for synchronous code; use symbiosis.connect for coroutines")

    def flush(self) -> None:
        pass

    def cancel(self, call: Call) -> None:
        pass

    def interrupt(self, error: BaseException) -> None:
        pass


class BlockingChannel(SynchronousChannel, ABC):
    """One call is outstanding at a time, whichever thread makes it. A transport says how a connection carries it."""

    def __init__(self, address: str, client: str, retry_s: float) -> None:
        self.client = client
        self._checks: list[Check] = []
        self._address = address
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._closed = False
        self._in_pass = False
        self._spoiled = False
        """Whether somebody was interrupted in the middle of an exchange, by Ctrl-C say, or did not understand it."""
        self._pid = os.getpid()
        _channels.add(self)

    # --------------------------------------------------------------------------------------- what a transport provides

    @abstractmethod
    def _exchange(self, call: Call) -> Results:
        """Send a call and wait for its answer.

        Raises:
            OSError, ConnectionLostError, ExecutorClosedError: the executor is lost.
        """

    @abstractmethod
    def _tell(self, in_pass: bool) -> None:
        """Send BEGIN or END; harmless where nobody listens."""

    @abstractmethod
    def _join_again(self) -> None:
        """Another connection, in the place of the one that was lost, to an executor of the same model that passes
        all checks."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Have a call in progress on another thread end soon; ``_closed`` is set."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection; harmless a second time."""

    @abstractmethod
    def _let_go(self) -> None:
        """In a forked child: the connection is the parent's, leave it as it is."""

    # ------------------------------------------------------------------------------------------------------- a channel

    def call(self, call: Call) -> Results:
        with self._lock:
            while True:
                if self._closed:
                    raise self._closed_error()
                if self._spoiled:
                    self._reconnect(InterruptedError("a call was interrupted"), max(self._retry_s, AGAIN_S))
                    self._spoiled = False
                try:
                    return self._exchange(call)
                except (OSError, ConnectionLostError, ExecutorClosedError) as error:
                    self._reconnect(error, self._retry_s)
                except SymbiosisError as error:
                    self._spoiled = isinstance(error, WireError)
                    raise
                except BaseException:
                    # Nobody knows what was sent, and what is still to come. The executor keeps nothing between calls.
                    self._spoiled = True
                    raise

    def _reconnect(self, cause: Exception, patience_s: float) -> None:
        self._hang_up()
        if self._closed:
            raise self._closed_error()
        if patience_s <= 0:
            raise ConnectionLostError(f"lost the executor at {self._address}: {cause}") from cause
        if not self._spoiled:
            log.warning("executor lost", address=self._address, client=self.client, why=str(cause))
        last: BaseException = cause
        for delay in backoff(patience_s):
            time.sleep(delay)
            if self._closed:
                raise self._closed_error()
            try:
                self._join_again()
                if self._in_pass:
                    self._tell(True)
            except (OSError, *MAY_RETURN) as error:
                last = error
            else:
                log.info("executor is back", address=self._address, client=self.client)
                return
        raise ConnectionLostError(
            f"lost the executor at {self._address} and it did not come back within {patience_s:.0f} s: {last}"
        ) from last

    def before_return(self, check: Check) -> None:
        self._checks.append(check)

    def begin_pass(self) -> None:
        self._say(True)

    def end_pass(self) -> None:
        self._say(False)

    def _say(self, in_pass: bool) -> None:
        with self._lock:
            if self._in_pass != in_pass and not self._closed:
                self._in_pass = in_pass
                try:
                    self._tell(in_pass)
                except (OSError, SymbiosisError):
                    pass  # the next call finds out, and reconnects
                except BaseException:
                    self._spoiled = True  # half a message may be out
                    raise

    def close(self) -> None:
        """Leave. A call in progress on another thread ends."""
        if not self._closed:
            self._closed = True
            self._interrupt()
            with self._lock:  # a call in progress ends first
                self._hang_up()

    def _closed_error(self) -> ClientClosedError:
        if os.getpid() != self._pid:
            return forked_error(self.client)
        return ClientClosedError(f"the model of {self.client!r} was closed; open it again with symbiosis.open_model")


_channels: weakref.WeakSet[BlockingChannel] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child (a DataLoader's worker, say): the connections are the parent's alone."""
    for channel in list(_channels):
        channel._closed = True
        channel._lock = threading.Lock()
        channel._let_go()


os.register_at_fork(after_in_child=_forked)
