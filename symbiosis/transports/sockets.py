"""Sockets: addresses, who is at the other end, and how the kernel finds out that the other side is gone.

A process that ends closes its connections, which the other side sees at once. A host or a network that fails sends
nothing; the kernel then asks (keepalive), and ends the connection when no answer comes for some time. The kernel of a
process that is busy, or was stopped, answers: a matrix product that takes a minute loses no connection. Linux also ends
a connection whose receiver lets data wait for that time, although its kernel answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import NamedTuple

from symbiosis.errors import ConnectionLostError, UsageError

LOST_CLIENT_S = 30
"""Seconds without an answer of a client's kernel, or in which the client takes no data, after which the executor's side
of a connection is lost. It is less than the time for which clients try to come back, under a name that is free then."""
LOST_EXECUTOR_S = 90
"""The same for the client's side. An executor does not read for 60 s while a call waits for room. On Linux,
TCP_USER_TIMEOUT also decides when keepalive gives up."""


class Endpoint(NamedTuple):
    """IP address and port of ``tcp://host:port`` or ``dist://host:port``."""

    ip: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def resolve(address: str) -> Endpoint:
    """Return the first of :func:`resolve_all`, where a listener listens."""
    return resolve_all(address)[0]


def resolve_all(address: str) -> list[Endpoint]:
    """Return the IP addresses and the port of ``scheme://host:port``, in the order in which a client tries them. Blocks
    while it looks up the host. Raises UsageError: the address does not have this form; ConnectionLostError: there is no
    such host."""
    host, port = host_and_port(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectionLostError(f"{address}: there is no host {host!r}: {error}") from error
    return [Endpoint(ip, port) for ip in dict.fromkeys(str(where[4][0]) for where in found)]


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of ``scheme://host:port``. Raises UsageError if the address does not have this form."""
    scheme, _, where = address.partition("://")
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{address!r}: write {scheme}://host:port, such as {scheme}://127.0.0.1:7000")
    return host, int(port)


def bind(address: str, endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens. Raises UsageError: the port is in use, or not this host's."""
    try:
        return socket.create_server(endpoint, family=endpoint.family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # strerror also names the address, in Python's terms
        raise UsageError(f"cannot listen on {address}: {why}") from error


def carries_tensors(address: str) -> bool:
    """Return whether tensors travel over the connection itself. Over ``dist://`` they do not, so keys do not protect
    them."""
    return not address.startswith("dist:")


def prepare(connected: socket.socket, lost_s: int) -> None:
    """Set the options of one end of a TCP connection, which is lost ``lost_s`` after the other end's last answer."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", lost_s // 3),
        ("TCP_KEEPALIVE", lost_s // 3),  # the name of TCP_KEEPIDLE on macOS
        ("TCP_KEEPINTVL", lost_s // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * lost_s),
    ):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket: of a client that has connected, or of an executor when
    it began to listen."""
    pid, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
