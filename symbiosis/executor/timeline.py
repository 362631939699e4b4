"""A trace of what runs when, in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

One line shows the executor's batches, with their layers, rows, members and the policy's reason. One line for each
client shows when it was thinking, when its requests were queued, and when they ran.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.scheduler import LONE
from symbiosis.errors import UsageError
from symbiosis.executor.counters import group_name

log = logging.getLogger(__name__)

MAX_EVENTS = 5_000_000
"""Largest number of events in a trace, some 600 MB. A last event says that the trace is full."""
MAX_CLIENTS = 4096
"""Largest number of clients with a line; beyond it the oldest line ends, and its client may begin another."""
_BATCHES = 0


class Timeline:
    """Writes events to a file as they happen, so that the file is of use even if the process is killed.

    Times are seconds on the executor's clock. Thread-safe: lone requests run on their client's thread.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, file: str | Path, names: Sequence[str], now: float) -> None:
        self._names = names
        self._began = now
        self._lines: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._thinks_since: dict[str, float] = {}
        self._cut: dict[str, tuple[int, float]] = {}
        """By client: the request that was served in part, and the time until which it ran."""
        self._lock = threading.Lock()
        self.events = 0
        self._full = False
        try:
            self._file = Path(file).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise UsageError(f"cannot write a trace to {file}: {error.strerror or error}") from error
        self._file.write("[\n")
        self._name_line(_BATCHES, "batches")

    def ran(self, batch: Batch, answered: Sequence[Request], started: float, ended: float) -> None:
        """Record a batch, and the requests that it answered."""
        with self._lock:
            name = self._name_of(batch.key)
            members = sum([len(request.clients) for request, _, _ in batch.slices])
            pass_ = batch.key.pass_.name.lower()
            facts = {"rows": batch.rows, "members": members, "reason": batch.reason, "pass": pass_}
            self._event(_BATCHES, name, "batch", started, ended, facts)
            for request, start, stop in batch.slices:
                if start == 0 and request.joint:  # the line of joint walks themselves
                    self._thought(request.client, request.arrived)
                for client, part in request.clients.items():
                    rows = min(stop - start, round(part * request.rows))
                    line = self._line(client)
                    if start == 0:
                        self._thought(client, request.arrived)
                        if batch.reason is not LONE:
                            self._event(line, "waiting", "waiting", request.arrived, started)
                    elif (cut := self._cut.pop(client, None)) is not None and cut[0] == request.id:
                        self._event(line, "waiting", "waiting", cut[1], started)
                    if stop < request.rows:
                        self._cut[client] = request.id, ended
                    mine = {"rows": rows, "kind": request.kind.name.lower()}
                    self._event(line, name, "running", started, ended, mine)
            for request in answered:
                for client in {request.client, *request.clients}:
                    self._thinks_since[client] = ended

    def walk_began(self, client: str, now: float) -> None:
        with self._lock:
            self._line(client)  # so that the client is forgotten with its line
            self._thinks_since[client] = now

    def walk_ended(self, client: str, now: float) -> None:
        with self._lock:
            self._thought(client, now)

    def close(self) -> None:
        """Finish the file. A second call has no effect."""
        with self._lock:
            if not self._file.closed:
                with contextlib.suppress(OSError):
                    self._file.write("{}]\n")
                with contextlib.suppress(OSError):
                    self._file.close()

    def _thought(self, client: str, until: float) -> None:
        since = self._thinks_since.pop(client, None)
        if since is not None and until > since:
            self._event(self._line(client), "thinking", "thinking", since, until)

    def _line(self, client: str) -> int:
        line = self._lines.get(client)
        if line is None:
            if len(self._lines) >= MAX_CLIENTS:
                first = next(iter(self._lines))
                del self._lines[first]
                self._thinks_since.pop(first, None)
                self._cut.pop(first, None)
            line = self._lines[client] = next(self._numbers)
            self._name_line(line, client)
        return line

    def _name_line(self, line: int, name: str) -> None:
        self._write({"ph": "M", "name": "thread_name", "pid": 1, "tid": line, "args": {"name": name}})
        self._write({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": line, "args": {"sort_index": line}})

    def _event(
        self, line: int, name: str, category: str, began: float, ended: float, facts: dict[str, Any] | None = None
    ) -> None:
        began, ended = max(began, self._began), max(ended, self._began)  # a request may have been queued before
        event = {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": 1,
            "tid": line,
            "ts": round(1e6 * (began - self._began), 1),
            "dur": round(1e6 * (ended - began), 1),
        }
        if facts is not None:
            event["args"] = facts
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self._full or self._file.closed:
            return
        if self.events >= MAX_EVENTS:
            self._full = True
            log.warning("the trace has %d events, which is its limit; later events are not in it", self.events)
            ends = {"name": "the trace is full and ends here", "ts": event.get("ts", 0)}
            event = {"ph": "i", "s": "g", "pid": 1, "tid": _BATCHES, **ends}
        self.events += 1
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")
        except OSError as error:  # a full disk must not end the executor
            self._full = True
            log.error("the trace cannot be continued: %s", error)

    def _name_of(self, key: Key) -> str:
        return group_name([self._names[index] for index in key.layers])
