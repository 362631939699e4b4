"""Every built-in transport keeps what the public conformance kit asks for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from symbiosis.testing.transport import TransportConformance
from symbiosis.transports.keys import new_key

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


class TestTcp(TransportConformance):
    def address(self, folder: Path) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpWithKeys(TestTcp):
    def listen_options(self, folder: Path) -> dict[str, Any]:
        new_key(folder, "server")
        new_key(folder, "alice")
        return {"keys": folder}

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {**super().connect_options(folder), "key": folder / "alice.secret"}


class TestDist(TransportConformance):
    """Over gloo; NCCL takes two GPUs."""

    def address(self, folder: Path) -> str:
        return "dist://127.0.0.1:0"

    def listen_options(self, folder: Path) -> dict[str, Any]:
        return {"insecure": True}


class TestDistWithKeys(TestTcpWithKeys):
    def address(self, folder: Path) -> str:
        return "dist://127.0.0.1:0"

    def listen_options(self, folder: Path) -> dict[str, Any]:
        return {**super().listen_options(folder), "insecure": True}
