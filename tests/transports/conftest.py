"""Keys for tests of ``tcp://``."""

from __future__ import annotations

from pathlib import Path

import pytest

from symbiosis.transports.keys import new_key


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of an executor, of alice and of bob."""
    folder = tmp_path / "keys"
    for name in ("server", "alice", "bob"):
        new_key(folder, name)
    return folder


@pytest.fixture
def unknown(tmp_path: Path, keys: Path) -> Path:
    """A valid key that knows the executor's key, but that the executor does not know."""
    path = new_key(keys, "unknown")
    (keys / "unknown.public").unlink()
    return path.rename(tmp_path / "unknown.secret")
