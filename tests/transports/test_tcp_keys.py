"""Tests of ``tcp://`` with keys: the tenants that are admitted, and the data that each tenant sees."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

import symbiosis
from symbiosis.core import budget
from symbiosis.core.registry import make_transport
from symbiosis.errors import ConnectionLostError, RefusedError, UsageError
from symbiosis.transports import keys as keys_module
from symbiosis.transports import stream_line, tcp_listener, wire
from symbiosis.transports.keys import load_key, new_key
from symbiosis.transports.wire import Type
from tests.helpers import IDS, command, in_thread, until
from tests.transports.raw import a_call, hello, raw, receive, rows

LOCAL = "tcp://127.0.0.1:0"


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(getattr(record, "why", "")) for record in caplog.records if record.getMessage() == "client refused"]


def secret_in(path: Path) -> str:
    return path.read_text().partition("-----BEGIN PRIVATE KEY-----\n")[2].partition("\n")[0]


OTHER_CURVE = """-----BEGIN CERTIFICATE-----
MIIBPzCB/qADAgECAhRylU4PH1js4Q6pS1SvGQibZ6bY0DAKBggqhkjOPQQDAjAM
MQowCAYDVQQDDAFtMCAXDTI2MTEyODEyNTYxN1oYDzIxMjYxMTA0MTI1NjE3WjAM
MQowCAYDVQQDDAFtMEIwFAYHKoZIzj0CAQYJKyQDAwIIAQEBAyoABJbz/rspIpQx
fGn6s7FEKHlNWtU/pXXHA4wxZ/l1jfbDQ+Vuf0fBgc+jUzBRMB0GA1UdDgQWBBRA
L5PQtU8JOGRUNWffR7eV07Jk/jAfBgNVHSMEGDAWgBRAL5PQtU8JOGRUNWffR7eV
07Jk/jAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCAzAAMC0CFBdptXeZtQ2A
BcfPiaA49meHr4qAAhUAjqvukfHSfNNncg00AhfVFYLJKdM=
-----END CERTIFICATE-----
"""
"""A certificate on the curve brainpoolP160r1, which Python's cryptography does not know."""
TENANT = """
import sys, torch, symbiosis
address, key = sys.argv[1:]
with symbiosis.open_model(address, key=key, retry=0.0) as model, torch.no_grad():
    print(model(torch.arange(3, 21).reshape(2, 9)).logits.sum().item())
"""


async def process(address: str, key: Path) -> tuple[int, str, str]:
    """Run a tenant in a process of its own, and return exit status, output and errors."""
    tenant = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TENANT, address, str(key), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(tenant.communicate(), 60)
    return tenant.returncode or 0, out.decode(), err.decode()


async def test_two_tenants_one_with_a_wrong_key(
    base: Any, keys: Path, unknown: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        with caplog.at_level(logging.INFO, "symbiosis"):
            let_in, kept_out = await asyncio.gather(
                process(listener.address, keys / "alice.secret"), process(listener.address, unknown)
            )
        with torch.no_grad():
            assert float(let_in[1]) == pytest.approx(base(IDS).logits.sum().item(), rel=1e-4)
    assert let_in[0] == 0
    assert kept_out[0] == 1
    public = load_key(unknown).public
    assert "RefusedError" in kept_out[2]
    assert f"does not know the public key {public}" in kept_out[2]
    assert refusals(caplog) == ["its key is not in the folder of keys"]
    joined = [record for record in caplog.records if record.getMessage() == "client joined"]
    assert [getattr(record, "tenant", None) for record in joined] == ["alice"]
    secrets = [secret_in(path) for path in (unknown, keys / "alice.secret", keys / "server.secret")]
    shown = "".join(str(vars(record)) for record in caplog.records) + let_in[2] + kept_out[1] + kept_out[2]
    assert not any(secret in shown for secret in secrets)


async def test_another_executors_key(base: Any, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_key(tmp_path / "others", "server")
    mistaken = new_key(tmp_path / "others", "alice")
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        with pytest.raises(RefusedError, match="is not the one in this client's key file"):
            await symbiosis.connect(listener.address, key=mistaken).__aenter__()
        await until(lambda: refusals(caplog))
    assert "does not know this executor's public key" in refusals(caplog)[0]


async def test_a_key_on_one_side_only(base: Any, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with symbiosis.Executor(base) as executor:
        closed = await executor.listen(LOCAL, keys=keys)
        open_ = await executor.listen(LOCAL)
        with pytest.raises(RefusedError, match="admits clients with a key"):
            await symbiosis.connect(closed.address).__aenter__()
        with pytest.raises(RefusedError, match="it runs without keys, or another service has this address"):
            await symbiosis.connect(open_.address, key=keys / "alice.secret").__aenter__()
        await until(lambda: len(refusals(caplog)) == 2)
    assert "this executor admits clients with a key" in refusals(caplog)[0]
    assert "bytes is announced" in refusals(caplog)[1]


async def test_keys_of_tenants_are_added_and_removed_without_a_restart(base: Any, keys: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        async with symbiosis.connect(listener.address, key=new_key(keys, "carol")):
            pass
        (keys / "carol.public").unlink()
        with pytest.raises(RefusedError):
            await symbiosis.connect(listener.address, key=keys / "carol.secret").__aenter__()


async def test_connections_do_not_look_at_every_key(
    base: Any, keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer without a key must not cost the event loop time for each tenant, or a line of the log for each file."""
    looks = 0
    original = keys_module._state

    def state(path: Path) -> Any:
        nonlocal looks
        looks += 1
        return original(path)

    (keys / "broken.public").write_text("x")
    monkeypatch.setattr(tcp_listener, "SWEEP_S", 60.0)
    monkeypatch.setattr(keys_module, "_state", state)
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL, keys=keys)
        looks = 0
        with caplog.at_level(logging.WARNING, "symbiosis"):
            silent = [raw(listener.address) for _ in range(30)]
            await until(lambda: len(listener.lines) == 30)
        assert looks == 0
        new_key(keys, "carol")
        async with symbiosis.connect(listener.address, key=keys / "carol.secret", retry=0) as remote:
            assert await remote.status()
        assert looks == 4
        for one in silent:
            one.socket.close()
    ignored = [record for record in caplog.records if record.getMessage() == "key file ignored"]
    assert len(ignored) <= 2


async def test_files_that_admit_nobody_are_told(base: Any, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tenant with a second file would be locked out by deleting both only."""
    caplog.set_level(logging.WARNING)
    for name, source in (("eve", "alice"), ("self", "server")):
        (keys / f"{name}.public").write_bytes((keys / f"{source}.public").read_bytes())
    async with symbiosis.Executor(base) as executor:
        await executor.listen(LOCAL, keys=keys)
        told = {getattr(record, "file", ""): str(getattr(record, "why", "")) for record in caplog.records}
        assert "alice.public has the same key; delete both" in told["eve.public"]
        assert told["self.public"] == "it is the executor's own key"
        assert executor.service.keyed_tenants == {"alice", "bob"}


@pytest.mark.parametrize(
    ("part", "other"),
    [(bytes.fromhex("a003020102"), bytes.fromhex("a003020107")), (b"carol", b"\xff" * 5)],
    ids=["an unknown version", "a name that is no UTF-8"],
)
async def test_a_certificate_that_cannot_be_read_keeps_out_no_other_tenant(
    base: Any, keys: Path, caplog: pytest.LogCaptureFixture, part: bytes, other: bytes
) -> None:
    """Python's cryptography cannot read the first, and OpenSSL cannot read the second."""
    _, good = certificate("carol")
    data = ssl.PEM_cert_to_DER_cert(good).replace(part, other)
    (keys / "carol.public").write_text(ssl.DER_cert_to_PEM_cert(data))
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        async with symbiosis.connect(listener.address, key=keys / "alice.secret") as remote:
            assert await remote.status()
    assert [record.file for record in caplog.records if hasattr(record, "file")] == ["carol.public"]
    assert command("keys", "list", "--keys", str(keys)).stdout == "alice\nbob\n"


async def test_a_folder_without_tenants_is_told(base: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    new_key(tmp_path / "keys", "server")
    async with symbiosis.Executor(base) as executor:
        await executor.listen(LOCAL, keys=tmp_path / "keys")
    assert "no tenant has a key here" in caplog.text


def test_a_folder_without_keys_says_how_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no keys; make them with `symbiosis keys new NAME --keys .*none`"):
        make_transport(LOCAL, keys=tmp_path / "none")


def test_the_executors_own_files_belong_together(keys: Path) -> None:
    (keys / "server.public").write_bytes((keys / "alice.public").read_bytes())
    with pytest.raises(UsageError, match=r"server.public is not the certificate of .*server.secret"):
        make_transport(LOCAL, keys=keys)


@pytest.mark.parametrize("years", [(2000, 2001), (9998, 9999)], ids=["expired", "not valid yet"])
async def test_dates_of_certificates_have_no_meaning(base: Any, keys: Path, years: tuple[int, int]) -> None:
    """Clocks of hosts differ, and the file of a key that is no longer valid is removed."""
    for name in ("server", "carol"):
        secret, public = certificate("carol", years=years)
        pem = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        others = "" if name == "server" else (keys / "server.public").read_text()
        (keys / f"{name}.public").write_text(public)
        (keys / f"{name}.secret").write_text(pem + public + others)
        (keys / f"{name}.secret").chmod(0o600)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        async with symbiosis.connect(listener.address, key=keys / "carol.secret", retry=0) as remote:
            assert await remote.status()


async def test_a_tenant_cannot_admit_others(base: Any, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The certificate of a tenant may claim to be one of an authority. No certificate that it signs is admitted."""
    authority, secret = certificate("carol"), Ed25519PrivateKey.generate()
    (keys / "carol.public").write_text(authority[1])
    signed = certificate("mallory", secret, authority[0])
    mallory = keys / "mallory.secret"
    pem = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    mallory.write_text(pem + signed[1] + (keys / "server.public").read_text() + authority[1])
    mallory.chmod(0o600)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        with pytest.raises(RefusedError, match="its key is not in the folder"):
            await symbiosis.connect(listener.address, key=mallory).__aenter__()
    assert refusals(caplog) == ["its key is not in the folder of keys"]


def certificate(
    name: str,
    key: Ed25519PrivateKey | None = None,
    authority: Ed25519PrivateKey | None = None,
    years: tuple[int, int] = (2000, 9999),
) -> tuple[Ed25519PrivateKey, str]:
    """Return an authority's key and certificate, or those of a key that an authority has signed."""
    key = key or Ed25519PrivateKey.generate()
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)]) for who in (name, "carol"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(years[0], 1, 1))
        .not_valid_after(datetime.datetime(years[1], 12, 31))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(authority or key, None)
    )
    return key, made.public_bytes(Encoding.PEM).decode()


async def test_removing_a_key_ends_its_sessions(
    base: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps: list[None] = []
    sweep = tcp_listener.TcpListener._sweep
    monkeypatch.setattr(tcp_listener, "SWEEP_S", 0.05)
    monkeypatch.setattr(tcp_listener.TcpListener, "_sweep", lambda self: (sweeps.append(None), sweep(self)))
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = symbiosis.connect(listener.address, key=keys / "alice.secret", retry=60.0)
        bob = symbiosis.connect(listener.address, key=keys / "bob.secret")
        async with alice, bob, alice.client() as hers, bob.client(name="bob") as his:
            await hers.forward(input_ids=IDS)
            (keys / "alice.public").unlink()
            await until(lambda: executor.status()["clients"] == ["bob/bob"])
            with pytest.raises(RefusedError, match="the key of alice was removed"):  # and it is not admitted again
                await asyncio.wait_for(hers.forward(input_ids=IDS), 20)
            (keys / "bob.public").rename(keys / "robert.public")
            away = await asyncio.to_thread(keys.rename, tmp_path / "elsewhere")
            before = len(sweeps)
            await until(lambda: len(sweeps) > before + 1)
            await asyncio.to_thread(away.rename, keys)
            await his.forward(input_ids=IDS)  # a folder that cannot be read removes no key


async def test_a_broken_key_folder_does_not_end_authentication(
    base: Any, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alice = {"key": keys / "alice.secret"}
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        away = keys.with_name("away")
        await asyncio.to_thread(keys.rename, away)
        with pytest.raises(ConnectionLostError):
            await symbiosis.connect(listener.address, key=away / "alice.secret").__aenter__()
        assert any("No such file" in why for why in refusals(caplog))
        await asyncio.to_thread(away.rename, keys)
        (keys / "broken.public").write_text("no key")
        (keys / "curve.public").write_text(OTHER_CURVE)
        (keys / "gone.public").symlink_to(keys / "nowhere.public")
        os.mkfifo(keys / "pipe.public")
        async with symbiosis.connect(listener.address, **alice) as remote:
            assert (await remote.status())["layers"] == 15
        assert {*listener.keys.names().values()} == {"alice", "bob"}


async def test_a_folder_that_cannot_be_read_is_logged_once(
    base: Any, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tcp_listener, "SWEEP_S", 0.01)
    away = keys.with_name("away")
    async with symbiosis.Executor(base) as executor:
        await executor.listen(LOCAL, keys=keys)
        for _ in range(2):
            await asyncio.to_thread(keys.rename, away)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(away.rename, keys)
            await asyncio.sleep(0.1)
    told = [record.getMessage() for record in caplog.records if "the keys" in record.getMessage()]
    assert told == ["cannot read the keys", "the keys can be read again"] * 2


async def test_a_tenant_cannot_use_the_session_of_another(base: Any, keys: Path) -> None:
    """Names and ids of calls belong to one connection."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = await in_thread(raw, listener.address, keys / "alice.secret")
        bob = await in_thread(raw, listener.address, keys / "bob.secret")
        with alice, bob:
            for tenant in (alice, bob):
                tenant.send(hello("a"))
                assert (await in_thread(receive, tenant))[0] is Type.WELCOME
            assert executor.status()["clients"] == ["alice/a", "bob/a"]
            bob.send(wire.pack(Type.CANCEL, 1))
            alice.send(a_call(1), rows())
            assert (await in_thread(receive, alice))[0] is Type.RESULT
            assert not bob.poll()
        await until(lambda: not executor.status()["clients"])


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
async def test_a_closed_listener_leaves_nothing(base: Any, keys: Path, tmp_path: Path, scheme: str) -> None:
    address, options = {
        "inproc": ("inproc://another", {}),
        "shm": (f"shm://{tmp_path}/a.sock", {}),
        "tcp": (LOCAL, {"keys": keys}),
    }[scheme]
    async with symbiosis.Executor(base) as executor:
        before = executor.status()["addresses"]
        for _ in range(2):
            listener = await executor.listen(address, **options)
            assert executor.status()["addresses"] == [*before, listener.address]
            await listener.close()
            await listener.close()
            assert executor.status()["addresses"] == before
            executor.service.check_name("alice")  # a name without a key again


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_client_without_a_key_cannot_have_the_name_of_a_tenant_with_one(
    base: Any, keys: Path, tmp_path: Path, scheme: str
) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(LOCAL, keys=keys)
        address = (await executor.listen(f"shm://{tmp_path}/s.sock" if scheme == "shm" else LOCAL)).address
        async with symbiosis.connect(address) as remote:
            for name in ("alice", "alice/job"):
                with pytest.raises(RefusedError, match="is for a tenant with a key"):
                    await remote.client(name=name).open()
            async with remote.client(name="carol/job"):
                assert executor.status()["clients"] == ["carol/job"]
        async with executor.client(name="alice/provided"):  # the provider's own clients have any name
            pass


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:7000"])
async def test_plaintext_stays_on_this_host(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(UsageError, match="insecure=True"):
            await executor.listen(address)
        with pytest.raises(UsageError, match="insecure=True"):
            await symbiosis.connect(address).__aenter__()
        listener = await executor.listen("tcp://0.0.0.0:0", insecure=True)
        async with symbiosis.connect(listener.address.replace("0.0.0.0", "127.0.0.1")) as remote:
            assert (await remote.status())["layers"] == 15


def test_keys_are_checked(keys: Path, tmp_path: Path) -> None:
    assert (keys / "alice.secret").stat().st_mode & 0o777 == 0o600
    assert load_key(keys / "server.secret").context is None
    assert "secret" not in repr(load_key(keys / "alice.secret"))
    keys.chmod(0o770)
    with pytest.raises(UsageError, match="chmod go-w"):
        make_transport(LOCAL, keys=keys)
    keys.chmod(0o700)
    with pytest.raises(UsageError, match="exists"):
        new_key(keys, "alice")
    with pytest.raises(UsageError, match="cannot be called"):
        new_key(keys, "../alice")
    with pytest.raises(UsageError, match=r"no server\.public"):
        new_key(tmp_path / "nowhere", "alice")
    with pytest.raises(UsageError, match=r"ends in \.secret"):
        load_key(keys / "alice.public")
    with pytest.raises(UsageError, match="cannot read"):
        load_key(keys / "missing.secret")
    with pytest.raises(UsageError, match=r"append its server\.public"):
        make_transport(LOCAL, key=keys / "server.secret")
    new_key(keys, "carol")
    (keys / "bob.secret").chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        load_key(keys / "bob.secret")
    alices, carols = ((keys / f"{name}.secret").read_text() for name in ("alice", "carol"))
    end = "-----END PRIVATE KEY-----\n"
    (keys / "alice.secret").write_text(carols.partition(end)[0] + end + alices.partition(end)[2])
    with pytest.raises(UsageError, match="do not belong together"):
        load_key(keys / "alice.secret")


async def test_peers_without_a_key_keep_out_no_tenant(
    base: Any, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them goes when they have taken what one owner may take, or all connections of the listener."""
    monkeypatch.setattr(tcp_listener, "HANDSHAKE_S", 60.0)
    monkeypatch.setattr(budget, "UNKNOWN_BYTES", 4 << 20)
    shm = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base, max_bytes=104 << 20) as executor:
        listener: Any = await executor.listen(LOCAL, keys=keys)
        await executor.listen(shm)
        with caplog.at_level(logging.INFO, "symbiosis"):
            silent = [raw(listener.address) for _ in range(100)]
            await until(lambda: len(listener.lines) == len(listener.unknown) == 8)
            for address, options in ((listener.address, {"key": keys / "alice.secret"}), (shm, {})):
                async with symbiosis.connect(address, **options) as remote, remote.client() as client:
                    await client.forward(input_ids=IDS)
            monkeypatch.setattr(stream_line, "MAX_CONNECTIONS", 4)
            async with symbiosis.connect(listener.address, key=keys / "alice.secret", retry=0) as remote:
                assert await remote.status()
        for one in silent:
            one.socket.close()
    cut = [record for record in caplog.records if record.getMessage() == "connection cut"]
    assert 0 < len(cut) < 80, "such lines are limited in number"
