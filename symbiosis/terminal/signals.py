"""Signals that ask a command to end: Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends when it is closed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from symbiosis.terminal.console import discard


@contextlib.contextmanager
def heeded(stop: Callable[[int], object]) -> Iterator[None]:
    """Call ``stop`` with the number of each SIGINT, SIGTERM or SIGHUP. SIGHUP stays ignored under nohup.

    After a SIGHUP the output to the terminal is discarded, because a write to a closed terminal is an error.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def heed(number: int, frame: Any) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            discard(terminals)
        stop(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        numbers.append(hangup)
    before = {number: signal.signal(number, heed) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
