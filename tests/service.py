"""An executor in a process of its own: ``symbiosis serve``.

Importing torch and transformers takes four seconds, so most processes are forks of one that has imported both.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from symbiosis.core.registry import make_transport
from symbiosis.errors import SymbiosisError
from symbiosis.testing import tiny_model

__all__ = ["Service", "free_port", "save_model"]

WORDS = "the cat dog sat ran on mat log and then what is a list of numbers that grow".split()  # noqa: SIM905


def save_model(folder: Path, model: Any = None, **options: Any) -> Path:
    """Save a model, by default a small Llama, and a tokenizer of words as a checkpoint."""
    (model or tiny_model("llama", **options)).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


_given: set[int] = set()
"""The ports that :func:`free_port` has returned."""


def free_port() -> int:
    """Return a TCP port that no process uses, below those that Linux gives to outgoing connections.

    The system does not give it to another process before the caller uses it, and this function gives it once only.
    """
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port := 20_000 + secrets.randbelow(12_000)))
            if port not in _given:
                _given.add(port)
                return port


class _Fork:
    """A fork of a process that has imported everything, which runs the command: like a ``Popen``.

    It has the environment of the first of these processes, and ends without the shutdown of an interpreter. If the
    first one is started in another folder than this repository's, nothing is imported ahead, and all start later.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["tests.imported"])
        self._process: ForkServerProcess = forks.Process(target=_command, args=(arguments, str(log)), daemon=True)
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)  # torch reads it in the first of these processes
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("symbiosis serve", timeout)
        return self._process.exitcode


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def _command(arguments: Sequence[str], log: str) -> None:
    from symbiosis.__main__ import main

    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor, at in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(descriptor, at)
    sys.argv = ["symbiosis", *arguments]
    main()


class Service:
    """A process of ``symbiosis serve`` on an address, which can be started, killed and started again.

    ``fresh``: whether it is started as a user starts it, and not as a fork. ``launcher``: arguments of Python with
    which another program starts the command.
    """

    def __init__(
        self,
        model: Path,
        address: str,
        *options: str,
        log: Path | None = None,
        fresh: bool = False,
        launcher: Sequence[str] = (),
    ) -> None:
        self.address = address
        self._arguments = ["serve", str(model), "--listen", address, "--log-format", "json", *options]
        self._launcher = launcher
        self._fresh = fresh or bool(launcher)
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._log = log or model.parent / f"service-{time.monotonic_ns()}.log"

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        if self._fresh:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *self._launcher, "-m", "symbiosis", *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
        else:
            self._process = _Fork(self._arguments, self._log)
        end = time.monotonic() + 180  # importing torch takes long beside a dozen other processes
        while True:
            try:
                make_transport(self.address).look(self.address)
            except SymbiosisError as error:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise AssertionError(f"the service did not start:\n{self.log}") from error
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """Kill the process with ``kill -9``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask the process to end, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(20)

    def wait(self, within_s: float) -> int:
        """Wait until the process has ended, and return its exit status."""
        assert self._process is not None
        return self._process.wait(within_s)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
