"""An executor in a process of its own, started as a user starts it: ``symbiosis serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
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


def free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """A process of ``symbiosis serve`` on an address, which can be started, killed and started again.

    ``launcher``: arguments of Python with which another program starts the command.
    """

    def __init__(
        self, model: Path, address: str, *options: str, log: Path | None = None, launcher: Sequence[str] = ()
    ) -> None:
        self.address = address
        self._command = [
            sys.executable,
            *launcher,
            "-m",
            "symbiosis.cli.main",
            "serve",
            str(model),
            "--listen",
            address,
        ]
        self._command += ["--log-format", "json", *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = log or model.parent / f"service-{time.monotonic_ns()}.log"

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
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
