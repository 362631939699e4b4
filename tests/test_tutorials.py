"""The tutorials of the documentation run as they are written, and print what they show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.service import free_port

ROOT = Path(__file__).parent.parent
PAGES = ("docs/providers.md", "docs/tenants.md")
"""In the order in which a reader takes them: the second one continues the first one."""
SERVES = "symbiosis serve"
"""Beginning of a block that runs in a terminal of its own until Ctrl-C."""
TYPED = "you: "
"""Beginning of a line that the reader types."""


class Block(NamedTuple):
    """Code of a tutorial, and lines that it prints, among others."""

    language: str
    code: str
    shown: str


def blocks(page: str) -> Iterator[Block]:
    """Return the blocks of the section whose heading begins with "Tutorial". A block of text has what the block before
    it prints."""
    section = re.split(r"^## ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (tutorial,) = (text for text in section if text.startswith("Tutorial"))
    found = re.findall(r"^```(\w*)\n(.*?)^```$", tutorial, re.DOTALL | re.MULTILINE)
    for (language, code), (after, shown) in zip(found, [*found[1:], ("", "")], strict=True):
        if language != "text":
            yield Block(language, code, shown if after == "text" else "")


def normal(line: str) -> str:
    """Return a line without numbers and repeated spaces, which differ from machine to machine."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "#", line.replace(TYPED, "")).split())


class Terminal:
    """A shell in a folder."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._log = log
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("wb") as file:
            self._shell = subprocess.Popen(
                ["bash"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._read = 0

    def run(self, code: str, shown: str, *, then: str = "") -> None:
        """Run code, and check that all lines of ``shown`` are printed within two minutes; by the end of the code, which
        ``then`` announces, if it is not empty."""
        typed = [line.removeprefix(TYPED) for line in shown.splitlines() if line.startswith(TYPED)]
        if typed:
            code = "\n".join([f"{code.rstrip()} <<'END'", *typed, "", "END", ""])
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{code}echo; echo {then}\n".encode())
        self._shell.stdin.flush()
        wanted = [normal(line) for line in shown.splitlines() if not line.startswith(TYPED.rstrip())]
        ended = normal(then)
        wanted += [ended] if ended else []
        deadline = time.monotonic() + 120
        while True:
            text = self._log.read_text()
            printed = [normal(line) for line in text[self._read :].splitlines()]
            missing = [line for line in wanted if line not in printed]
            if not missing:
                self._read = len(text)
                return
            if time.monotonic() > deadline or self._shell.poll() is not None or (ended and ended in printed):
                pytest.fail(f"{code}\nThis was not printed: {missing}\nThis was:\n{text[self._read :]}")
            time.sleep(0.1)

    def close(self) -> None:
        """Press Ctrl-C, and close the terminal."""
        os.killpg(self._shell.pid, signal.SIGINT)
        try:
            self._shell.communicate(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_tutorials(tmp_path: Path) -> None:
    """The folder and the port are other ones; nothing else is."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    port, numbers = str(free_port()), iter(range(1000))
    with ExitStack() as stack:

        def terminal(folder: Path) -> Terminal:
            made = Terminal(folder, tmp_path / f"terminal-{next(numbers)}.log")
            stack.callback(made.close)
            return made

        reader = terminal(tmp_path)
        for page in PAGES:
            for language, code, shown in blocks(page):
                code, shown = code.replace("7000", port), shown.replace("7000", port)
                if language == "python":
                    (tmp_path / "tutorial" / "block.py").write_text(code, encoding="utf-8")
                    code = "python block.py\n"
                if code.startswith(SERVES):
                    terminal(tmp_path / "tutorial").run(code, shown)
                else:
                    reader.run(f"set -e\n{code}", shown, then=f"block {next(numbers)} has ended")
        for name in ("trainer", "coroutines"):
            assert (tmp_path / "tutorial" / "adapters" / name / "adapter_model.safetensors").is_file()
