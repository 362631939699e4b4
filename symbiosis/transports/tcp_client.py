"""The client's side of ``tcp://``: one channel for coroutines, one for plain synchronous code."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from symbiosis.core.requests import Call, Expected, Key, LayerSpec, expected
from symbiosis.core.share import Share
from symbiosis.core.transport import Check, Identity, Look
from symbiosis.errors import (
    ClientClosedError,
    ConnectionLostError,
    ExecutorClosedError,
    RefusedError,
    RequestError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.log import get_logger
from symbiosis.transports import wire
from symbiosis.transports.backoff import MAY_RETURN, backoff
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.chunks import Progress, ShareFile, bar_unless
from symbiosis.transports.sockets import Frames, matrices, payload
from symbiosis.transports.tcp_connection import MAX_FRAME_BYTES, Connection, Line, Message, Options
from symbiosis.transports.threads import LoopThread, ThreadCalls
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import CallMessage, Hello, Limits, Type

__all__ = ["Options", "Pending", "TcpBlockingChannel", "TcpChannel", "look"]

log = get_logger(__name__)

WATCH_S = 1.5
PING_AFTER_S = 5.0
SILENT_FOR_S = 120.0
"""An executor that lives but leaves a call and pings unanswered for so long is given up. Its death shows in seconds."""
_CPU = torch.device("cpu")

Results = tuple[torch.Tensor, ...]


def look(address: str, options: Options) -> Look:
    """What there is to see without joining. Blocks."""

    async def see() -> Look:
        connection = Connection(address, options)
        welcome = await connection.open(Hello(None))
        try:
            status = await connection.ask(Type.STATUS)
        finally:
            connection.close()
        if not isinstance(status, dict):
            raise WireError(f"the executor at {address} has no status")
        return Look(status, welcome.description, welcome.tokenizer)

    with LoopThread() as thread:
        return thread.run(see())


async def share_of(connection: Connection, welcome: Welcome, progress: Progress | None) -> Share:
    """Return the share, fetching its tensors from the executor unless this process has them."""
    share = welcome.known()
    if share is None:
        file = ShareFile(welcome.content.get("share_bytes"))
        try:
            await connection.fetch(file, progress)
            share = welcome.share(file.tensors)
        finally:
            file.close()
    return share


def measure(call: Call, due: Expected, layers: Sequence[LayerSpec], limits: Limits) -> tuple[int, int]:
    """Rows of a call, and bytes there and back.

    Raises:
        RequestError: its tensors are not what its layers take.
        UsageError: they are more than the executor allows.
    """
    rows = call.tensors[0].shape[0]
    widths, dtype, results = due
    if not rows or [(tensor.shape, tensor.dtype) for tensor in call.tensors] != [((rows, n), dtype) for n in widths]:
        wanted = " and ".join(f"[n, {width}]" for width in widths)
        got = " and ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in call.tensors)
        raise RequestError(f"{layers[call.key.layers[0]].name} takes {wanted} {dtype} with n ≥ 1, not {got}")
    size = rows * (sum(widths) + sum(results)) * dtype.itemsize
    most = min(limits.arena_bytes, MAX_FRAME_BYTES)
    if size > most:
        raise UsageError(
            f"a call of {rows} rows needs {size} bytes there and back; the executor allows {most}; "
            "send fewer tokens at once, or ask its host for a larger arena_bytes limit"
        )
    return rows, size


def check_again(address: str, welcome: Welcome, before: Welcome, checks: Sequence[Check]) -> None:
    """Whether calls may be sent to an executor that was found again.

    Raises:
        RefusedError: it has another model.
        SymbiosisError: what a check says.
    """
    if welcome.fingerprint != before.fingerprint:
        raise RefusedError(f"the executor at {address} came back with another model; open a new client")
    for check in checks:
        check(welcome.identity)


@dataclass(slots=True, eq=False)
class Pending:
    """A call that was sent, or is to be."""

    id: int
    call: Call
    reply: asyncio.Future[Results] | None
    """None when nobody waits any more."""
    rows: int
    size: int
    """Bytes, there and back."""


class TcpChannel:
    """For coroutines: answers arrive on the event loop.

    It never has more outstanding than the executor's limits allow: further calls wait here, in order. When the
    connection is lost, it reconnects and sends again what was outstanding; calls made meanwhile wait.
    """

    def __init__(self, connection: Connection, welcome: Welcome, share: Share, hello: Hello, options: Options) -> None:
        self.client = str(hello.name)
        self._hello = hello
        self._checks: list[Check] = []
        self.device = self.device_for(welcome)
        self.welcome = welcome
        self.layers: Sequence[LayerSpec] = welcome.layers
        self.share = share
        self._address = connection.address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._expected: dict[Key, Expected] = {}
        self._in_pass = False
        self._waiting: deque[Pending] = deque()
        self._sent: dict[int, Pending] = {}
        self._rows = self._bytes = 0
        """Of what was sent."""
        self._ended: SymbiosisError | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._heard = time.monotonic()
        self._watcher: asyncio.TimerHandle | None = None
        self._threads = ThreadCalls(self._loop, self.send, self.cancel)
        self.call = self._threads.call
        self.interrupt = self._threads.interrupt
        self._use(connection)
        self._watch()

    @classmethod
    async def open(cls, address: str, hello: Hello, options: Options) -> TcpChannel:
        """Join the executor at ``address``."""
        connection = Connection(address, options)
        welcome = await connection.open(hello)
        try:
            share = await share_of(connection, welcome, options.progress)
            return cls(connection, welcome, share, hello, options)
        except BaseException:
            connection.close()
            raise

    @staticmethod
    def device_for(welcome: Welcome) -> torch.device:
        """Where the client's tensors are."""
        return _CPU

    def identity(self) -> Identity:
        return self.welcome.identity

    def before_return(self, check: Check) -> None:
        self._checks.append(check)

    def _expects(self, key: Key) -> Expected:
        found = self._expected.get(key)
        if found is None:
            found = self._expected[key] = expected(self.layers, key)
        return found

    # ---------------------------------------------------------------------------------------------------------- calls

    def send(self, call: Call) -> asyncio.Future[Results]:
        if self._ended is not None:
            raise self._ended
        rows, size = measure(call, self._expects(call.key), self.layers, self.welcome.limits)
        call.id = next(self._ids)
        reply: asyncio.Future[Results] = self._loop.create_future()
        self._waiting.append(Pending(call.id, call, reply, rows, size))
        self._send_waiting()
        return reply

    def _send_waiting(self) -> None:
        limits = self.welcome.limits
        while self._waiting and self._connection is not None:
            pending = self._waiting[0]
            if self._sent and (
                len(self._sent) >= limits.calls
                or self._rows + pending.rows > limits.rows
                or self._bytes + pending.size > limits.arena_bytes
            ):
                return
            self._waiting.popleft()
            if not self._sent:
                self._heard = time.monotonic()
            self._sent[pending.id] = pending
            self._rows += pending.rows
            self._bytes += pending.size
            self._transmit(self._connection, pending)

    def _transmit(self, connection: Connection, pending: Pending) -> None:
        call = pending.call
        message = wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))
        connection.send([message, *map(payload, call.tensors)])

    def _received(self, message: Message) -> None:
        self._heard = time.monotonic()
        type_, content, frames = message
        if type_ is Type.ENDED:
            error = wire.error_of(*content[:2])
            if isinstance(error, ExecutorClosedError) and self._options.retry_s > 0:
                self._lost(error)
            else:
                self._end(error)
            return
        if type_ not in (Type.RESULT, Type.FAILED):
            return
        pending = self._sent.get(wire.read_id(content))
        if pending is None:
            return
        if type_ is Type.FAILED:
            self._settle(pending, wire.error_of(*content[1:3]))
        else:
            self._take_results(pending, frames)

    def _take_results(self, pending: Pending, frames: Frames) -> None:
        if pending.reply is None:
            self._settle(pending, ())
        else:
            _, dtype, widths = self._expects(pending.call.key)
            self._settle(pending, matrices(frames, pending.rows, widths, dtype))

    def _settle(self, pending: Pending, outcome: Results | SymbiosisError) -> None:
        del self._sent[pending.id]
        self._rows -= pending.rows
        self._bytes -= pending.size
        reply = pending.reply
        if reply is not None and not reply.done():
            if isinstance(outcome, tuple):
                reply.set_result(outcome)
            else:
                reply.set_exception(outcome)
        if self._waiting:
            self._send_waiting()

    def cancel(self, call: Call) -> None:
        pending = self._sent.get(call.id)
        if pending is not None and pending.call is call:
            if pending.reply is not None:
                pending.reply = None
                self._say(wire.pack(Type.CANCEL, call.id))  # it counts until the executor has answered
        else:
            self._waiting = deque(pending for pending in self._waiting if pending.call is not call)

    def flush(self) -> None:
        pass

    def begin_pass(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._in_pass = True
        self._say(_BEGIN)

    def end_pass(self) -> None:
        self._in_pass = False
        self._say(_END)

    def _say(self, message: bytes) -> None:
        if self._connection is not None:
            self._connection.send([message])

    # -------------------------------------------------------------------------------------------- connections and ends

    def _use(self, connection: Connection) -> None:
        self._connection = connection
        self._rows = self._bytes = 0
        again = [pending for pending in self._sent.values() if pending.reply is not None]
        self._sent.clear()
        self._waiting.extendleft(reversed(again))
        connection.hand_on(self._received, self._lost)
        if self._in_pass:
            self._say(_BEGIN)
        self._send_waiting()

    def _watch(self) -> None:
        """Every second or two: is the executor still there?"""
        self._watcher = self._loop.call_later(WATCH_S, self._watch)
        connection = self._connection
        if connection is None:
            return
        unheard = time.monotonic() - self._heard
        if connection.silent():
            connection.lose(ConnectionLostError(f"there is no sign of life from the executor at {self._address}"))
        elif self._sent and unheard > SILENT_FOR_S:
            connection.lose(
                ConnectionLostError(f"the executor at {self._address} has not answered for {unheard:.0f} s")
            )
        elif self._sent and unheard > PING_AFTER_S:
            self._say(_PING)

    def _lost(self, error: SymbiosisError) -> None:
        if self._ended is not None or self._connection is None:
            return
        self._connection.close()
        self._connection = None
        if isinstance(error, WireError):
            self._end(error)
        elif self._options.retry_s <= 0:
            self._end(ConnectionLostError(str(error)))
        else:
            self._reconnecting = self._loop.create_task(self._reconnect(error))

    async def _reconnect(self, why: SymbiosisError) -> None:
        log.warning("executor lost", address=self._address, client=self.client, why=str(why))
        for delay in backoff(self._options.retry_s):
            await asyncio.sleep(delay)
            connection = Connection(self._address, self._options)
            try:
                welcome = await connection.open(self._hello)
                check_again(self._address, welcome, self.welcome, self._checks)
            except MAY_RETURN as error:
                connection.close()
                why = error
                continue
            except SymbiosisError as error:
                connection.close()
                self._end(error)
                return
            self.welcome = welcome
            try:
                self._use(connection)
            except MAY_RETURN as error:  # gone again
                connection.close()
                why = error
                continue
            log.info("executor is back", address=self._address, client=self.client)
            return
        patience = f"{self._options.retry_s:.0f} s"
        self._end(
            ConnectionLostError(
                f"lost the executor at {self._address} and it did not come back within {patience}: {why}"
            )
        )

    def _end(self, error: SymbiosisError) -> None:
        """Every call that waits ends with ``error``, and every later one."""
        if self._ended is not None:
            return
        self._ended = error
        for pending in (*self._sent.values(), *self._waiting):
            if pending.reply is not None and not pending.reply.done():
                pending.reply.set_exception(error)
        self._sent.clear()
        self._waiting.clear()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self._end(ClientClosedError(f"the client {self.client!r} was closed"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()


class TcpBlockingChannel(BlockingChannel):
    """For synchronous code: the thread that calls uses the ZeroMQ socket itself.

    There is no thread of ours between a caller and ZeroMQ's, and none that would have to stay awake for signs of life:
    ZeroMQ sends heartbeats, and the kernel knows when a byte came last. Handshakes need an event loop, and have one in
    a thread that ends with them.
    """

    def __init__(
        self, address: str, line: Line, welcome: Welcome, share: Share, hello: Hello, options: Options
    ) -> None:
        super().__init__(address, str(hello.name), options.retry_s)
        self._hello = hello
        self.device = _CPU
        self.welcome = welcome
        self.layers: Sequence[LayerSpec] = welcome.layers
        self.share = share
        self._options = options
        self._line = line
        self._ids = itertools.count(1)
        self._expected: dict[Key, Expected] = {}

    @classmethod
    def open(cls, address: str, hello: Hello, options: Options) -> TcpBlockingChannel:
        """Join the executor at ``address``."""

        async def join(progress: Progress | None) -> tuple[Line, Welcome, Share]:
            connection = Connection(address, options)
            welcome = await connection.open(hello)
            try:
                share = await share_of(connection, welcome, progress)
            except BaseException:
                connection.close()
                raise
            return connection.detach(), welcome, share

        with LoopThread() as thread, bar_unless(options.progress, address) as progress:
            return cls(address, *thread.run(join(progress)), hello, options)

    def identity(self) -> Identity:
        return self.welcome.identity

    def _exchange(self, call: Call) -> Results:
        expected_ = self._expected.get(call.key)
        if expected_ is None:
            expected_ = self._expected[call.key] = expected(self.layers, call.key)
        rows, _ = measure(call, expected_, self.layers, self.welcome.limits)
        id_ = next(self._ids)
        message = wire.pack_call(CallMessage(id_, call.key, call.kind, rows, 0, 0))
        self._line.send([message, *map(payload, call.tensors)])
        type_, content, frames = self._answer(id_)
        if type_ is Type.FAILED:
            raise wire.error_of(*content[1:3])
        return matrices(frames, rows, expected_.results, expected_.dtype)

    def _answer(self, id_: int) -> Message:
        """RESULT or FAILED of call ``id_``."""
        began = asked = time.monotonic()
        while True:
            message = self._line.receive()
            if message is None:
                now = time.monotonic()
                if self._closed:
                    raise self._closed_error()
                if now - began > SILENT_FOR_S:
                    raise ConnectionLostError(f"{self._address} has not answered for {now - began:.0f} s")
                if now - asked > PING_AFTER_S:
                    asked = now
                    self._line.send([_PING])
                continue
            began = asked = time.monotonic()
            if message.type is Type.ENDED:
                raise wire.error_of(*message.content[:2])
            if message.type in (Type.RESULT, Type.FAILED) and wire.read_id(message.content) == id_:
                return message

    def _tell(self, in_pass: bool) -> None:
        self._line.send([_BEGIN if in_pass else _END])

    def _join_again(self) -> None:
        async def join() -> tuple[Line, Welcome]:
            connection = Connection(self._address, self._options)
            welcome = await connection.open(self._hello)
            try:
                check_again(self._address, welcome, self.welcome, self._checks)
            except BaseException:
                connection.close()
                raise
            return connection.detach(), welcome

        with LoopThread() as thread:
            self._line, self.welcome = thread.run(join())

    def _interrupt(self) -> None:
        pass  # it looks every tenth of a second

    def _hang_up(self) -> None:
        self._line.close()

    def _let_go(self) -> None:
        pass  # pyzmq leaves a parent's sockets alone


_BEGIN, _END, _PING = (wire.pack(type_) for type_ in (Type.BEGIN, Type.END, Type.PING))
