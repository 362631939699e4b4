"""Measurements in a process of their own, for its peak memory."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["in_process"]


def in_process(fn: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Run a function in a new process and return its result."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(send, fn, args))
    process.start()
    send.close()
    try:
        return dict(json.loads(receive.recv_bytes()))
    except EOFError:
        raise RuntimeError(f"the process that measured memory ended with exit code {process.exitcode}") from None
    finally:
        process.join()


def _report(send: Any, fn: Callable[..., dict[str, float]], args: tuple[Any, ...]) -> None:
    send.send_bytes(json.dumps(fn(*args)).encode())
