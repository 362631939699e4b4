"""Keys for ``tcp://``: a folder of key files on the executor's side, one file on each tenant's side.

A key is an Ed25519 key pair with a self-signed certificate, for TLS 1.3. ``server.secret`` and ``server.public`` are
the executor's own. Every other ``name.public`` in the folder admits the tenant of that name, whom its certificate
identifies. A tenant's ``name.secret`` also contains the executor's certificate, so a tenant needs only this file. A
tenant that wants to keep its secret to itself makes the pair and gives the provider the public file.

Each side admits the certificates in its files only. A certificate that one of them has signed is not accepted. Names
and dates in certificates have no meaning here: a certificate is valid as long as its file is there.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import re
import ssl
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from symbiosis.errors import UsageError

SERVER = "server"
"""Name of the executor's own pair."""
MAX_FILE_BYTES = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BLOCK = re.compile(r"-----BEGIN (PRIVATE KEY|CERTIFICATE)-----[^-]+-----END \1-----")
_PEM = serialization.Encoding.PEM
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which ``ssl`` has no name."""


class KeyPair(NamedTuple):
    """A key pair that :func:`load_key` has checked."""

    path: Path
    """Its ``.secret`` file, from which ``ssl`` reads the pair."""
    public: str
    """Identity of the pair: SHA-256 of its certificate, in hexadecimal digits."""
    context: ssl.SSLContext | None
    """Settings of a client's TLS connections; None if the file holds no executor's certificate."""

    def __repr__(self) -> str:
        return f"<KeyPair {self.public}>"


def new_key(folder: str | Path, name: str) -> Path:
    """Make a pair, ``name.secret`` (readable by its owner only) and ``name.public``. Return the path of the secret.

    The pair called ``server`` is the executor's own and must come first: its certificate goes into each tenant's file.

    Raises:
        UsageError: the name is not valid or in use, there is no ``server`` pair, or the folder is not writable.
    """
    folder = Path(folder)
    check_key_name(name)
    server = ""
    if name != SERVER:
        if not (folder / f"{SERVER}.public").exists():
            raise UsageError(f"{folder} has no {SERVER}.public; make the executor's own key, {SERVER!r}, first")
        server = _certificates(folder / f"{SERVER}.public")[0]
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    public = certificate.public_bytes(_PEM).decode()
    secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / f"{name}.public").exists():  # before a secret is written
            raise FileExistsError(errno.EEXIST, "", str(folder / f"{name}.public"))
        text = f"# The SECRET key of {name}: keep it private.\n{secret}{public}{server}"
        path = _write(folder / f"{name}.secret", 0o600, text)
        _write(folder / f"{name}.public", 0o644, f"# The public key of {name}.\n{public}")
    except FileExistsError as error:
        raise UsageError(f"{error.filename} exists; remove it first if this key is to be replaced") from error
    except OSError as error:
        raise UsageError(f"cannot write a key to {folder}: {error.strerror or error}") from error
    return path


def check_key_name(name: str) -> None:
    """Raise UsageError if no key can have a name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"a key cannot be called {name!r}; a name has up to 64 of the characters A-Z a-z 0-9 . _ -")


def _write(path: Path, mode: int, text: str) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    return path


def load_key(path: str | Path) -> KeyPair:
    """Return the pair in a ``.secret`` file. Raises UsageError if it is no ``.secret`` file, or other users can read
    it. No message shows a secret."""
    path = Path(path)
    secrets = [text for kind, text in _blocks(path) if kind == "PRIVATE KEY"]
    if len(secrets) != 1:
        raise UsageError(f"{path} has no secret key; give the file whose name ends in .secret")
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by other users than its owner; chmod 600 it")
    own, *others = _certificates(path)
    try:
        secret = serialization.load_pem_private_key(secrets[0].encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"{path} has a secret key that cannot be read; `symbiosis keys new` makes keys") from None
    if secret.public_key() != x509.load_pem_x509_certificate(own.encode()).public_key():
        raise UsageError(f"the two keys in {path} do not belong together")
    context = None
    if others:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # certificates are compared, whatever the host is called
        _settings(context, path)
        for certificate in others:
            _trust(context, path, certificate)
    return KeyPair(path, identity(ssl.PEM_cert_to_DER_cert(own)), context)


def identity(certificate: bytes) -> str:
    """Return the identity of a certificate (DER)."""
    return hashlib.sha256(certificate).hexdigest()


def _blocks(path: Path) -> list[tuple[str, str]]:
    """Return the kinds and texts of the PEM blocks in a file."""
    try:
        if not path.is_file():  # opening a pipe would block
            raise FileNotFoundError("there is no such file")
        with path.open(encoding="ascii") as file:
            return [(found[1], found[0] + "\n") for found in _BLOCK.finditer(file.read(MAX_FILE_BYTES))]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the key file {path}: {error}") from error


def _certificates(path: Path) -> list[str]:
    """Return the certificates in a file (PEM), of which there is at least one."""
    found = [text for kind, text in _blocks(path) if kind == "CERTIFICATE"]
    try:
        for text in found:
            x509.load_pem_x509_certificate(text.encode()).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):  # the second for a curve that it does not know
        found = []
    if not found:
        raise UsageError(f"{path} is no key file; `symbiosis keys new` makes them")
    return found


def _settings(context: ssl.SSLContext, own: Path) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Compare whole certificates (many have one name), and not their dates with the clocks of both hosts.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    try:
        context.load_cert_chain(own)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"the key in {own} cannot be used: {error}") from error


def _trust(context: ssl.SSLContext, path: Path, certificate: str) -> None:
    """Accept a certificate from a file. Raises UsageError if OpenSSL, which reads more of it than cryptography does,
    cannot read it."""
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as error:
        raise UsageError(f"the certificate in {path} cannot be used: {error}") from error


class Keyring:
    """The executor's keys: its own pair and the certificates of the tenants that it admits.

    No restart is needed to add or remove a tenant. Each connection looks whether files were added to the folder or
    removed. :meth:`names` looks at every file, which takes 10 ms for 1,000 tenants: too long for each connection of a
    peer that may have no key.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.is_dir() and self.folder.stat().st_mode & 0o022:
            raise UsageError(f"{folder} can be written by other users, who could admit themselves; chmod go-w it")
        if not (self.folder / f"{SERVER}.secret").exists():
            raise UsageError(f"{folder} has no keys; make them with `symbiosis keys new NAME --keys {folder}`")
        self.own = load_key(self.folder / f"{SERVER}.secret")
        public = self.folder / f"{SERVER}.public"
        if public.is_file() and identity(ssl.PEM_cert_to_DER_cert(_certificates(public)[0])) != self.own.public:
            raise UsageError(
                f"{public} is not the certificate of {self.own.path}, and tenants who have it would refuse this "
                f"executor; copy the certificate in {self.own.path} to it"
            )
        self._seen: dict[Path, tuple[int, int] | None] | None = None
        self._changed = 0
        """When files were last added or removed, at the last look at all files."""
        self._names: dict[str, str] = {}
        self._context: ssl.SSLContext
        self.broken: dict[str, str] = {}
        """Key files that do not count, and the reasons."""

    def names(self) -> Mapping[str, str]:
        """Return the tenants that are admitted, by identity. Raises OSError if the folder cannot be read."""
        changed = self.folder.stat().st_mtime_ns
        files = [path for path in self.folder.iterdir() if path.suffix == ".public" and path.stem != SERVER]
        seen = {path: _state(path) for path in sorted(files)}
        if seen != self._seen:
            names: dict[str, str] = {}
            broken: dict[str, str] = {}
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.num_tickets = 0  # no session outlives the tenant's key
            _settings(context, self.own.path)
            for path in seen:
                try:
                    certificate = _certificates(path)[0]
                    found = identity(ssl.PEM_cert_to_DER_cert(certificate))
                    if found == self.own.public:
                        broken[path.name] = "it is the executor's own key"
                    elif found in names:
                        other = f"{names[found]}.public"
                        broken[path.name] = f"{other} has the same key; delete both to lock its tenant out"
                    else:
                        _trust(context, path, certificate)
                        names[found] = path.stem
                except UsageError as error:
                    broken[path.name] = str(error)
            self._context = context
            self._seen, self._names, self.broken = seen, names, broken
        self._changed = changed
        return self._names

    def tenants(self) -> Collection[str]:
        """Return the names of the tenants that were admitted at the last look at the folder."""
        return self._names.values()

    def name_of(self, identity: str) -> str | None:
        """Return the tenant with this identity, by the last look at the folder; None if it was not admitted then."""
        return self._names.get(identity)

    def context(self) -> ssl.SSLContext:
        """Return the settings of the executor's TLS connections. Raises OSError if the folder cannot be read, and
        UsageError if the executor's own key cannot be used any more."""
        if self.folder.stat().st_mtime_ns != self._changed:
            self.names()
        return self._context


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes with the content of a file; None for a dangling link."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size
