"""CURVE keys for ``tcp://``: a folder of key files on the executor's side, one file on each tenant's side.

``server.secret`` and ``server.public`` are the executor's own pair. Every other ``name.public`` in the folder admits
one tenant: the public key identifies the tenant, and ``name`` appears in logs. A tenant's ``name.secret`` also contains
the executor's public key, so a tenant needs only this file. A tenant that wants to keep its secret to itself makes the
pair and gives the provider the public file.

The files have the form of ZeroMQ certificates (``zmq.auth.load_certificate`` reads them).
Keys are in Z85: 40 characters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from symbiosis.errors import UsageError

SERVER = "server"
"""Name of the executor's own pair."""
MAX_FILE_BYTES = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r'^\s*(public-key|secret-key|server-key)\s*=\s*"([^"\s]{40})"\s*$', re.MULTILINE)


class KeyPair(NamedTuple):
    """A key pair, and the executor's public key if it is known; all in Z85."""

    public: bytes
    secret: bytes
    server: bytes | None

    def __repr__(self) -> str:
        return f"<KeyPair {self.public.decode()}>"


def new_key(folder: str | Path, name: str) -> Path:
    """Make a pair, ``name.secret`` (readable by its owner only) and ``name.public``. Return the path of the secret.

    The pair called ``server`` is the executor's own and must come first: its public key goes into each tenant's file.

    Raises:
        UsageError: the name is not valid or in use, there is no ``server`` pair, or the folder is not writable.
    """
    folder = Path(folder)
    if not _NAME.fullmatch(name):
        raise UsageError(f"a key cannot be called {name!r}; a name has up to 64 of the characters A-Z a-z 0-9 . _ -")
    server = None
    if name != SERVER:
        if not (folder / f"{SERVER}.public").exists():
            raise UsageError(f"{folder} has no {SERVER}.public; make the executor's own key, {SERVER!r}, first")
        server = _read(folder / f"{SERVER}.public")["public-key"]
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = {"public-key": public, "secret-key": secret} | ({} if server is None else {"server-key": server})
        path = _write(folder / f"{name}.secret", 0o600, f"The SECRET key of {name}: keep it private.", lines)
        _write(folder / f"{name}.public", 0o644, f"The public key of {name}.", {"public-key": public})
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists; remove it first if this key is to be replaced") from error
    except OSError as error:
        raise UsageError(f"cannot write a key to {folder}: {error.strerror or error}") from error
    return path


def _write(path: Path, mode: int, title: str, lines: dict[str, bytes]) -> Path:
    text = f"# {title}\n\ncurve\n" + "".join(f'    {name} = "{key.decode()}"\n' for name, key in lines.items())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    return path


def load_key(path: str | Path) -> KeyPair:
    """Return the pair in a ``.secret`` file. Raises UsageError if the file is no such file, or other users can read it.
    No message shows a secret."""
    path = Path(path)
    found = _read(path)
    if "secret-key" not in found:
        raise UsageError(f"{path} has no secret key; give the file whose name ends in .secret")
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by other users than its owner; chmod 600 it")
    public, secret = found["public-key"], found["secret-key"]
    if zmq.curve_public(secret) != public:
        raise UsageError(f"the two keys in {path} do not belong together")
    return KeyPair(public, secret, found.get("server-key"))


def _read(path: Path) -> dict[str, bytes]:
    try:
        if not path.is_file():  # opening a pipe would block
            raise FileNotFoundError("there is no such file")
        with path.open(encoding="ascii") as file:
            found = {name: key.encode() for name, key in _LINE.findall(file.read(MAX_FILE_BYTES))}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the key file {path}: {error}") from error
    try:
        if "public-key" in found and all(len(z85.decode(key)) == 32 for key in found.values()):
            return found
    except (KeyError, ValueError):
        pass
    raise UsageError(f"{path} is no key file; `symbiosis keys new` makes them")


class Keyring:
    """The executor's keys: its own pair and the public keys of the tenants that it admits.

    The folder is read again at each handshake if it has changed, so no restart is needed to add or remove a tenant.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.own = load_key(self.folder / f"{SERVER}.secret")
        self._seen: dict[Path, tuple[int, int] | None] = {}
        self._names: dict[bytes, str] = {}
        self.broken: dict[str, str] = {}
        """Malformed key files and the reasons. Their tenants are not admitted."""

    def name_of(self, public: bytes) -> str | None:
        """Return the tenant with this public key (Z85); None if it is not admitted. Raises OSError if the folder cannot
        be read."""
        return self.names().get(public)

    def names(self) -> Mapping[bytes, str]:
        """Return the tenants that are admitted, by public key (Z85). Raises OSError if the folder cannot be read."""
        files = [path for path in self.folder.iterdir() if path.suffix == ".public" and path.stem != SERVER]
        seen = {path: _state(path) for path in sorted(files)}
        if seen != self._seen:
            self._seen, self._names, self.broken = seen, {}, {}
            for path in seen:
                try:
                    self._names.setdefault(_read(path)["public-key"], path.stem)
                except UsageError as error:
                    self.broken[path.name] = str(error)
        return self._names


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes with the content of a file; None for a dangling link."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size
