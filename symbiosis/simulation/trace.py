"""Traces: arrival times and lengths of requests for text, read from files."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from symbiosis.errors import UsageError

COLUMNS = ("arrival_s", "ContextTokens", "GeneratedTokens")
TIMESTAMP = "TIMESTAMP"
"""Column that may replace the first one."""
MAX_TOKENS = 1_000_000


class Arrival(NamedTuple):
    """One request for text."""

    at: float
    """Seconds from the beginning of the trace."""
    prompt: int
    """Tokens of the prompt, 1 or more."""
    tokens: int
    """Tokens to generate, 1 or more."""
    conversation: int | None = None
    """Number of the conversation that it belongs to, if it belongs to one. One client sends all its requests."""
    pause: float | None = None
    """Seconds after the preceding request of the conversation was answered, at which it arrives in place of ``at``."""
    slo: float = 1.0
    """Factor for the latency targets."""


def read_trace(file: Path, limit: int | None = None) -> list[Arrival]:
    """Read a trace from a CSV file.

    The columns are ``arrival_s``, ``ContextTokens`` and ``GeneratedTokens``, in any order. ``TIMESTAMP``, a date and
    time, may replace the first, as in Azure's traces of inference (Patel et al., "Splitwise", ISCA '24). Other columns
    are ignored, and so are rows that generate nothing.

    Args:
        file: UTF-8 text.
        limit: number of requests to return, the earliest ones; None for all.

    Returns:
        Requests in order of arrival, with seconds from the first one.

    Raises:
        UsageError: the file cannot be read, or a row has no valid value. The message names the line.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            above = 0  # empty lines before the header
            first = next(lines, "")
            while first.isspace():
                above, first = above + 1, next(lines, "")
            rows = csv.DictReader(chain([first], lines), skipinitialspace=True)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
            when = TIMESTAMP if TIMESTAMP in rows.fieldnames and COLUMNS[0] not in rows.fieldnames else COLUMNS[0]
            columns = when, *COLUMNS[1:]
            missing = [column for column in columns if column not in rows.fieldnames]
            if missing:
                raise UsageError(f"{file} has no column {missing[0]!r}; a trace has {', '.join(COLUMNS)}")
            arrivals = (_arrival(f"{file}, line {rows.line_num + above}", row, columns) for row in rows)
            asking = (arrival for arrival in arrivals if arrival.tokens)
            # The whole of a long trace may not fit into memory.
            found = sorted(asking, key=_at) if limit is None else heapq.nsmallest(limit, asking, key=_at)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read the trace {file}: {error}") from error
    if not found:
        raise UsageError(f"{file} has no request in it")
    began = found[0].at
    return [arrival._replace(at=arrival.at - began) for arrival in found]


def _at(arrival: Arrival) -> float:
    return arrival.at


def _arrival(where: str, row: dict[str, str | None], columns: Sequence[str]) -> Arrival:
    at, prompt, tokens = (_number(where, row, column, columns) for column in columns)
    return Arrival(at, max(int(prompt), 1), int(tokens))


def _number(where: str, row: dict[str, str | None], column: str, columns: Sequence[str]) -> float:
    """Return the value of a column: seconds, or a number of tokens.

    Raises:
        UsageError: the value is missing or not valid.
    """
    text = (row[column] or "").strip()
    if not text:
        raise UsageError(f"{where}: {column} is missing; a row has {', '.join(columns)}")
    if column == TIMESTAMP:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"{where}: {column} is {text!r}; it must be a date and a time, such as 2023-11-16 18:15:46.68"
            ) from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if column == COLUMNS[0]:
        if not 0 <= value < math.inf:
            raise UsageError(f"{where}: {column} is {text!r}; it must be seconds, 0 or more")
    elif not (0 <= value <= MAX_TOKENS and value.is_integer()):  # a spreadsheet may have written 5.0
        raise UsageError(f"{where}: {column} is {text!r}; it must be a whole number of tokens, 0 to {MAX_TOKENS}")
    return value


def scaled(trace: Sequence[Arrival], *, speed: float = 1.0, lengths: float = 1.0) -> list[Arrival]:
    """Return the trace with arrivals ``speed`` times as fast and ``lengths`` times as many tokens, at least 1.

    Raises:
        UsageError: a prompt or an answer has more than :data:`MAX_TOKENS` tokens then.
    """
    longest = max((max(arrival.prompt, arrival.tokens) for arrival in trace), default=0)
    if longest * lengths > MAX_TOKENS:
        raise UsageError(
            f"lengths is {lengths:g}, and the longest text has {longest} tokens; together at most {MAX_TOKENS}"
        )
    return [
        arrival._replace(
            at=arrival.at / speed,
            prompt=max(round(arrival.prompt * lengths), 1),
            tokens=max(round(arrival.tokens * lengths), 1),
            pause=None if arrival.pause is None else arrival.pause / speed,
        )
        for arrival in trace
    ]
