"""The addresses of executors of one model, and what each of them shows."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.error import HTTPError

from symbiosis.core.registry import LISTS, addresses_in, make_transport, transport_options
from symbiosis.core.transport import Look
from symbiosis.errors import ConnectionLostError, SymbiosisError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports.connection import BlockingJoin, Join
from symbiosis.transports.conversation import MAY_RETURN
from symbiosis.transports.limits import MAX_REPLICAS
from symbiosis.transports.model_parts import checked
from symbiosis.transports.shm_client import socket_path
from symbiosis.transports.sockets import host_and_port

log = get_logger(__name__)

PATIENCE_S = 0.5
"""Seconds for which the other replicas may still answer after the first one has."""
SHOWN_WITHIN_S = 5.0
"""The same, where the status of each is asked for or none has answered: a replica in a long batch answers late."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks at all replicas by clients of one process."""
LIST_WITHIN_S = 5.0
"""Seconds for which a server may be silent that is asked for a list of addresses."""
MAX_LIST_BYTES = 64 << 10
MAX_ERROR_BYTES = 300


class Joinable(Protocol):
    """A transport whose connections can replace each other."""

    def look(self, address: str) -> Look: ...
    def join(self, address: str) -> Join: ...
    def join_blocking(self, address: str) -> BlockingJoin: ...


class Replica(NamedTuple):
    """One address, and the transport to it."""

    address: str
    transport: Joinable


Looks = Mapping[Replica, Look | SymbiosisError]
"""What each replica that has answered shows, or why it does not."""


class Addresses:
    """Addresses of executors of one model, or of its parts.

    Args:
        address: the addresses, separated by commas, or where a list with an address on each line is kept:
            ``file:///path`` or ``http://host:port/path``. The list is read again before each look.
        **options: of the transports. Each transport gets those that it has.

    Raises:
        UsageError: a transport cannot be used here, an address is there twice, an option has no valid value, or the
            file cannot be read.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self._options = options
        self._list = address if address.startswith(LISTS) else None
        self._text: str | None = None
        self.replicas = self._made(address) if self._list is None else []
        if address.startswith("file://"):
            self._read(address)
        self._looked = -LOOK_EVERY_S
        self.seen: Looks = {}
        """What the latest look has shown."""

    def _made(self, address: str) -> list[Replica]:
        addresses = addresses_in(address)
        if len(set(addresses)) < len(addresses) or len(addresses) > MAX_REPLICAS:
            raise UsageError(f"{address}: give up to {MAX_REPLICAS} different addresses")
        made = []
        for each in addresses:
            if each.partition("://")[0] not in ("shm", "tcp"):
                raise UsageError(f"{each}: an address beside others can be shm:// or tcp://")
            if each.startswith("shm:") and "key" in self._options and (self._list or "").startswith("http"):
                raise UsageError(f"{each}: a list from a server can have only tcp:// addresses for a client with a key")
            (socket_path if each.startswith("shm:") else host_and_port)(each)  # refuse one that is malformed
            taken = transport_options(each)
            transport: Any = make_transport(
                each, **{name: self._options[name] for name in self._options.keys() & taken}
            )
            made.append(Replica(each, transport))
        return made

    def _read(self, source: str) -> None:
        """Read the list of addresses, and use it if it has changed. Blocks.

        Raises:
            UsageError: the list cannot be read, or is malformed.
            ConnectionLostError: the server does not give it.
        """
        text = _text_at(source)
        if text == self._text:
            return
        found = ",".join(filter(None, (line.partition("#")[0].strip() for line in text.splitlines())))
        if not found:
            raise UsageError(f"{source} has no address; write one on each line")
        known = {replica.address: replica for replica in self.replicas}
        self.replicas = [known.get(replica.address, replica) for replica in self._made(found)]
        self._text = text

    def looks(self, patience_s: float | None = PATIENCE_S) -> Looks:
        """Ask all replicas at once. Those that do not answer within ``patience_s`` after the first one are left out, as
        are all after :data:`SHOWN_WITHIN_S`; None waits for all."""
        if self._list is not None:
            try:
                self._read(self._list)
            except SymbiosisError as error:
                if not self.replicas:
                    raise
                log.warning("addresses not changed", why=str(error))  # those that were read before stay in use
        asked = list(self.replicas)
        answers: queue.SimpleQueue[tuple[Replica, Look | SymbiosisError]] = queue.SimpleQueue()

        def ask(replica: Replica) -> None:
            try:
                look = replica.transport.look(replica.address)
                checked(replica.address, look.model)
                answers.put((replica, look))
            except (SymbiosisError, OSError) as error:
                answers.put((replica, as_symbiosis(replica, error)))

        for replica in asked:
            threading.Thread(target=ask, args=(replica,), daemon=True).start()
        found: dict[Replica, Look | SymbiosisError] = {}
        until = None if patience_s is None else time.monotonic() + max(patience_s, SHOWN_WITHIN_S)
        while len(found) < len(asked):
            try:
                replica, answer = answers.get(timeout=None if until is None else max(until - time.monotonic(), 0))
            except queue.Empty:
                break
            found[replica] = answer
            if isinstance(answer, Look) and patience_s is not None and until is not None:
                until = min(until, time.monotonic() + patience_s)
        silent = {
            replica: ConnectionLostError(f"no executor answers on {replica.address} in time")
            for replica in asked
            if replica not in found
        }
        found |= silent
        self._looked = time.monotonic()
        self.seen = {replica: found[replica] for replica in asked}
        return self.seen

    def look_again(self) -> None:
        """Look at all replicas on another thread, unless that was done a short time ago."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            threading.Thread(target=self.looks, daemon=True).start()


def _text_at(source: str) -> str:
    """Return the list of addresses in a file, or from a server. Raises like :meth:`Addresses.looks`."""
    try:
        if source.startswith("file://"):
            return Path(source.removeprefix("file://")).read_text()
        with urllib.request.urlopen(source, timeout=LIST_WITHIN_S) as answer:
            return str(answer.read(MAX_LIST_BYTES).decode())
    except (OSError, ValueError, HTTPException) as error:
        kind: type[SymbiosisError] = UsageError if source.startswith("file://") else ConnectionLostError
        why = str(error)
        if isinstance(error, HTTPError):
            kind = UsageError if error.code == 404 else ConnectionLostError
            why = f"{error}: {_first_line(error)}"
        raise kind(f"cannot read the addresses in {source.removeprefix('file://')}: {why}") from error


def _first_line(answer: HTTPError) -> str:
    """Return what a server says to an error, and close the connection."""
    with answer, contextlib.suppress(OSError, HTTPException):
        line = answer.read(MAX_ERROR_BYTES).decode(errors="replace").partition("\n")[0]
        return "".join(character for character in line if character.isprintable())
    return ""


def fingerprint_in(look: Look) -> object:
    """Return the fingerprint that an executor states."""
    return look.model.get("fingerprint")


def as_symbiosis(replica: Replica, error: Exception) -> SymbiosisError:
    """Return an error of a replica, as one of this package."""
    if isinstance(error, SymbiosisError):
        return error
    return ConnectionLostError(f"no executor answers on {replica.address}: {error}")


def together(errors: Sequence[SymbiosisError]) -> SymbiosisError:
    """Return the error for a client that could join no replica. If any of them allows another attempt, so does this
    one."""
    may_return = [error for error in errors if isinstance(error, MAY_RETURN)]
    if not may_return:
        return errors[0]
    return type(may_return[0])("; ".join(dict.fromkeys(map(str, errors))))
