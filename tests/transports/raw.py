"""A ZeroMQ client by hand, for what a real one would not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.transports import wire
from symbiosis.transports.keys import load_key
from symbiosis.transports.wire import CallMessage, Type

__all__ = ["a_call", "hello", "raw", "receive", "rows"]


def raw(address: str, key: Path | None = None, identity: bytes | None = None) -> Any:
    """Its socket."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.sndtimeo = 5000
    socket.reconnect_ivl = 600_000  # never; with -1 what has come and was not read yet is lost with the connection
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    if key is not None:
        pair = load_key(key)
        assert pair.server is not None
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, pair.server
    socket.connect("tcp:" + address.partition(":")[2])
    return socket


def hello(name: str | None) -> bytes:
    return wire.pack_hello(wire.Hello(name))


def a_call(id_: int, n: int = 1, layer: int = 0) -> bytes:
    return wire.pack_call(CallMessage(id_, Key((layer,), Pass.FORWARD), Kind.DECODE, n, 0, 0))


def rows(n: int = 1, width: int = 32) -> bytes:
    return bytes(4 * n * width)


def receive(socket: Any) -> tuple[Type, Any]:
    while True:
        assert socket.poll(20_000), "no answer"
        type_, content = wire.unpack_answer(socket.recv_multipart()[0])
        if type_ is not Type.PONG:  # with which the executor makes sure that a new client is there
            return type_, content
