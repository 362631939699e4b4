"""Every built-in transport keeps what the public conformance kit asks for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from symbiosis.testing.transport import TransportConformance

_names = itertools.count(1)


class TestInProc(TransportConformance):
    blocking = False

    def address(self, folder: Path) -> str:
        return f"inproc://conformance-{next(_names)}"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {}


class TestShm(TransportConformance):
    def address(self, folder: Path) -> str:
        return f"shm://{folder}/s.sock"
