"""Signals that ask a command to end: Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends when it is closed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from symbiosis.terminal.console import discard


def endings() -> list[int]:
    """Return the signals that ask this command to end. Under nohup, SIGHUP does not."""
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    hangups = [] if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else [hangup]
    return [signal.SIGINT, signal.SIGTERM, *hangups]


def without_terminal(stop: Callable[[int], object]) -> Callable[[int], object]:
    """Return a function for the number of a signal that calls ``stop`` with it.

    After a SIGHUP the output to the terminal is discarded, because a write to a closed terminal is an error.
    """
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def heed(number: int) -> object:
        if number not in (signal.SIGINT, signal.SIGTERM):
            discard(terminals)
        return stop(number)

    return heed


@contextlib.contextmanager
def heeded(stop: Callable[[int], object]) -> Iterator[None]:
    """Call ``stop`` with the number of each of :func:`endings`; see :func:`without_terminal`."""
    heed = without_terminal(stop)
    before = {number: signal.signal(number, lambda got, _: heed(got)) for number in endings()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
