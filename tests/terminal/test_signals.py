"""Signals that ask a command to end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from symbiosis.terminal.signals import heeded

CHILD = """
import signal, sys, time
from symbiosis.terminal.signals import heeded
come = []
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
with heeded(come.append):
    print("ready", flush=True)
    while not come:
        time.sleep(0.01)
    print("a write to a closed terminal", file=sys.stderr, flush=True)
sys.exit(100 + come[0])
"""


def test_a_command_goes_on_after_its_terminal_was_closed() -> None:
    terminal, its_end = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=its_end) as child:
        os.close(its_end)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.close(terminal)
        child.send_signal(signal.SIGHUP)
        assert child.wait(20) == 100 + signal.SIGHUP


def test_nohup_is_obeyed_and_handlers_are_put_back() -> None:
    come: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with heeded(come.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert come == [signal.SIGTERM]
        assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, before[1])
    finally:
        signal.signal(signal.SIGHUP, before[0])
