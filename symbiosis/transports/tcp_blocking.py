"""The client's end of ``tcp://`` connections for threads that block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from symbiosis.errors import ConnectionLostError
from symbiosis.transports import wire
from symbiosis.transports.carrier import Message
from symbiosis.transports.sockets import SILENT_S, read_event, received
from symbiosis.transports.tcp_client import Options, TcpConnection, TcpConnector
from symbiosis.transports.threads import LoopThread
from symbiosis.transports.wire import Hello

__all__ = ["BlockingTcpConnector"]

TICK_MS = 100
"""Milliseconds after which a thread that waits checks whether the executor is still there."""


class BlockingTcpConnector:
    """Opens connections to one executor for threads that block. The handshake uses an event loop in a thread that ends
    with it."""

    def __init__(self, address: str, options: Options) -> None:
        self._address = address
        self._options = options

    def join(self, hello: Hello, again: bool) -> _BlockingTcpConnection:
        async def join() -> _BlockingTcpConnection:
            return _BlockingTcpConnection(await TcpConnector(self._address, self._options).join(hello, again))

        with LoopThread() as thread:
            return thread.run(join())


class _BlockingTcpConnection:
    """A connection for threads that block, one at a time: the calling thread uses the ZeroMQ socket itself.

    No thread has to stay awake for signs of life: ZeroMQ sends heartbeats, and the kernel knows when a byte came last.
    """

    def __init__(self, opened: TcpConnection) -> None:
        self.welcome = opened.welcome
        self.share = opened.share
        self.carrier = opened.carrier
        self._address = opened.address
        self._context, self._socket, self._events, self._remote, self._messages = opened.release()
        self._ended = False
        self._socket.setsockopt(zmq.RCVTIMEO, TICK_MS)

    def send(self, parts: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # no limit on what may be queued
            raise self._gone() from error

    def receive(self) -> Message | None:
        if self._messages:
            return self._messages.popleft()
        try:
            frames = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            if self._ended:
                raise self._gone() from None
            self._check_alive()
            return None
        except zmq.ZMQError as error:
            raise self._gone() from error
        return Message(*wire.unpack_answer(frames[0].buffer), frames[1:])

    def _check_alive(self) -> None:
        """Note whether the connection has ended. One more attempt to receive follows, for the executor's reason."""
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._ended |= read_event(self._events).kind is zmq.Event.DISCONNECTED
        if self._remote is not None and received(*self._remote).silent_s > SILENT_S:
            raise ConnectionLostError(f"no sign of life from the executor at {self._address}")

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the executor at {self._address} is gone")

    def interrupt(self) -> None:
        pass  # receive returns every TICK_MS

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(0)
            self._context.term()

    def abandon(self) -> None:
        pass  # pyzmq does not touch the parent's sockets
