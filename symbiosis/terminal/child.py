"""Child processes that end with their parent, however the parent ends: commands of symbiosis, and workers of pools."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
LINES = 20
"""Lines of the output that are kept."""


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a child of this process that runs ``symbiosis`` with arguments.

    Linux kills the child when the thread that started it ends, so that thread has to wait for the child.
    """
    return [sys.executable, "-m", __spec__.name, str(os.getpid()), *arguments]


def start(arguments: Sequence[str], cwd: str | None = None) -> subprocess.Popen[str]:
    """Start ``symbiosis`` with arguments, both outputs in one pipe."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command(arguments),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def follow(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Copy a child's output to this process's until the child ends. Return its exit status and its last lines.

    A full disk below this process's output does not end the child.
    """
    last: deque[str] = deque(maxlen=LINES)
    assert child.stdout is not None
    for line in child.stdout:
        last.append(line)
        with contextlib.suppress(OSError):
            sys.stderr.write(line)
    return child.wait(), "".join(last).strip()


def reason(status: int, last: str) -> str:
    """Return why a child has ended, from its exit status and the last line of its output."""
    if status < 0:
        ended = f"ended by signal {-status} ({signal.strsignal(-status)})"
        return f"{ended}, after: {last}" if last else ended
    return last or f"ended with status {status}"


def stop(child: subprocess.Popen[str], within_s: float) -> None:
    """Ask a child to end, and kill it if it has not after some seconds."""
    child.send_signal(signal.SIGTERM)
    until = time.monotonic() + within_s
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    child.kill()


def end_with_parent() -> None:
    """Let this process, which multiprocessing has started, end when its parent ends. It would wait for work forever,
    because it can write to its own queue."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the command of the arguments. The first argument is the id of the process that started this one."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)
    import runpy

    sys.argv[0] = "symbiosis"
    runpy.run_module("symbiosis.__main__", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
