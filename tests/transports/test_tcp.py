"""``tcp://``: tenants anywhere, with keys and without."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.share import Share
from symbiosis.core.terms import Kind
from symbiosis.errors import ClientClosedError, ConnectionLostError, RefusedError, UsageError, WireError
from symbiosis.testing import Comparison, run_job, run_job_plain, tiny_model
from symbiosis.transports import wire
from symbiosis.transports.keys import load_key, new_key
from symbiosis.transports.share import CHUNK, ReceivedShare, ServedShare
from symbiosis.transports.sockets import resolve
from symbiosis.transports.wire import Limits, Type
from tests.helpers import BATCH, HANGS, IDS, METHODS, SHORT, adamw, assert_close, crowd, in_thread, lora, restart, until
from tests.transports.raw import a_call, hello, raw, receive, rows

T = TypeVar("T")
LOCAL = "tcp://127.0.0.1:0"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of an executor, of alice and of bob."""
    folder = tmp_path / "keys"
    for name in ("server", "alice", "bob"):
        new_key(folder, name)
    return folder


@pytest.fixture
def unknown(tmp_path: Path, keys: Path) -> Path:
    """A sound key that knows the executor's, but that the executor does not know."""
    path = new_key(keys, "unknown")
    (keys / "unknown.public").unlink()
    return path.rename(tmp_path / "unknown.secret")


def secret_in(path: Path) -> str:
    return path.read_text().partition("-----BEGIN PRIVATE KEY-----\n")[2].partition("\n")[0]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(getattr(record, "why", "")) for record in caplog.records if record.getMessage() == "client refused"]


# --------------------------------------------------------------------------------------------------------- equivalence


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("method", [*METHODS, None])
async def test_coroutines_alone_bit_equal(base: Any, method: str | None, encrypted: bool, keys: Path) -> None:
    config = METHODS[method]("llama") if method else None
    expected = run_job_plain(base, copy.deepcopy(config))
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys if encrypted else None)
        key = keys / "alice.secret" if encrypted else None
        async with symbiosis.connect(listener.address, key=key) as remote, remote.client(config, seed=0) as client:
            outcome = await run_job(client)
    comparison = Comparison.of(outcome, expected)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_synchronous_code_alone_bit_equal(base: Any, base_layers: str, encrypted: bool, keys: Path) -> None:
    expected = run_job_plain(base, lora())

    async with symbiosis.Executor(base, base_layers=base_layers) as executor:
        listener = await executor.listen(LOCAL, keys=keys if encrypted else None)

        def tenant() -> Any:
            key = keys / "alice.secret" if encrypted else None
            with symbiosis.open_model(listener.address, key=key) as opened:
                return run_job_plain(opened, lora())

        comparison = Comparison.of(await in_thread(tenant), expected)
        assert comparison.bit_equal, comparison
        assert executor.statistics().requests > 100


async def test_bfloat16(keys: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    expected = run_job_plain(model, lora())
    async with symbiosis.Executor(model) as executor:
        listener = await executor.listen(LOCAL)
        async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
            comparison = Comparison.of(await run_job(client), expected)
    assert comparison.bit_equal, comparison


async def test_among_others(base: Any) -> None:
    expected = run_job_plain(base, lora(), SHORT)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
            async with crowd(executor, [(lora(), "train"), (None, "generate")]):
                outcome = await run_job(client, SHORT)
    assert_close(outcome, expected)


# ---------------------------------------------------------------------------------------------------------------- keys


TENANT = """
import sys, torch, symbiosis
address, key = sys.argv[1:]
with symbiosis.open_model(address, key=key, retry=0.0) as model, torch.no_grad():
    print(model(torch.arange(3, 21).reshape(2, 9)).logits.sum().item())
"""


async def process(address: str, key: Path) -> tuple[int, str, str]:
    """A tenant in a process of its own: exit status, output, errors."""
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
        with pytest.raises(RefusedError, match="or it runs without keys"):
            await symbiosis.connect(open_.address, key=keys / "alice.secret").__aenter__()
        await until(lambda: len(refusals(caplog)) == 2)
    assert "this executor admits clients with a key" in refusals(caplog)[0]
    assert "bytes is announced" in refusals(caplog)[1]


async def test_tenants_come_and_go_without_a_restart(base: Any, keys: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        async with symbiosis.connect(listener.address, key=new_key(keys, "carol")):
            pass
        (keys / "carol.public").unlink()
        with pytest.raises(RefusedError):
            await symbiosis.connect(listener.address, key=keys / "carol.secret").__aenter__()


async def test_a_key_that_is_taken_away_ends_its_sessions(base: Any, keys: Path, tmp_path: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = symbiosis.connect(listener.address, key=keys / "alice.secret", retry=60.0)
        bob = symbiosis.connect(listener.address, key=keys / "bob.secret")
        async with alice, bob, alice.client() as hers, bob.client(name="bob") as his:
            await hers.forward(input_ids=IDS)
            (keys / "alice.public").unlink()
            await until(lambda: executor.status()["clients"] == ["bob/bob"], 5)
            with pytest.raises(RefusedError, match="the key of alice was removed"):  # and does not come back
                await asyncio.wait_for(hers.forward(input_ids=IDS), 5)
            (keys / "bob.public").rename(keys / "robert.public")
            away = await asyncio.to_thread(keys.rename, tmp_path / "elsewhere")
            await asyncio.sleep(1.5)
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
        (keys / "gone.public").symlink_to(keys / "nowhere.public")
        os.mkfifo(keys / "pipe.public")
        async with symbiosis.connect(listener.address, **alice) as remote:
            assert (await remote.status())["layers"] == 15


async def test_a_tenant_cannot_use_the_session_of_another(base: Any, keys: Path) -> None:
    """Names and ids of calls are each connection's own."""
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
    assert load_key(keys / "alice.secret").server in (keys / "server.public").read_text()
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


# ----------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address", ["tcp://", "tcp://host", "tcp://:7000", "tcp://127.0.0.1:x", "tcp://127.0.0.1:70000"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match="write tcp://host:port"):
        resolve(address)


async def test_no_executor_at_the_address(base: Any) -> None:
    with pytest.raises(ConnectionLostError, match="no executor answers on tcp://"):
        await symbiosis.connect(free_address()).__aenter__()
    with pytest.raises(ConnectionLostError, match=r"no host 'no\.such\.host\.invalid'"):
        await symbiosis.connect("tcp://no.such.host.invalid:7000", insecure=True).__aenter__()


async def test_a_port_in_use(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with pytest.raises(UsageError, match="cannot listen"):
            await executor.listen(listener.address)


async def test_ipv6(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://[::1]:0")
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            output = await client.forward(input_ids=IDS)
            torch.testing.assert_close(output.logits, base(IDS).logits)


# ----------------------------------------------------------------------------------------------------- share of a model


async def test_share_comes_in_chunks_with_progress(base: Any) -> None:
    model = tiny_model(vocab_size=40_000)  # an embedding of 5 MB
    seen: list[tuple[int, int]] = []
    async with symbiosis.Executor(model) as executor:
        listener = await executor.listen(LOCAL)
        transport = make_transport(listener.address, progress=lambda done, total: seen.append((done, total)))
        channel = await transport.connect(listener.address, "c")
        channel.close()
    assert [done for done, _ in seen[:-1]] == [CHUNK * (index + 1) for index in range(len(seen) - 1)]
    assert seen[-1][0] == seen[-1][1] > 5_000_000


def test_chunks_are_a_safetensors_file() -> None:
    tensors = {
        "a": torch.randn(300, 1000),
        "b": torch.randn(7, 3).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
        "turned": torch.arange(600_000).reshape(1000, 600).t(),
    }
    served = ServedShare(SimpleNamespace(share=lambda: Share({}, tensors, {})))  # type: ignore[arg-type]
    file = ReceivedShare(served.size())
    for start in range(0, served.size(), CHUNK):
        file.add(start, served.chunk(start))
    found = file.tensors()
    file.close()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    for start in (-CHUNK, 1, served.size() + CHUNK):
        with pytest.raises(WireError):
            served.chunk(start)
    with pytest.raises(PermissionError):
        os.pwrite(served.descriptor(), b"x", 0)
    served.close()


def test_a_share_that_lies() -> None:
    for size in (None, "1", -1, 3, 1 << 60):
        with pytest.raises(WireError):
            ReceivedShare(size)
    file = ReceivedShare(2 * CHUNK)
    with pytest.raises(WireError):
        file.add(CHUNK, bytes(CHUNK))
    with pytest.raises(WireError):
        file.add(0, bytes(5))
    file.add(0, bytes(CHUNK))
    file.add(CHUNK, bytes(CHUNK))
    with pytest.raises(WireError, match="cannot be read"):
        file.tensors()
    file.close()


# -------------------------------------------------------------------------------------------------- restarts and deaths


async def test_coroutines_survive_a_restart(base: Any) -> None:
    expected = run_job_plain(base, lora())
    address = free_address()
    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(4)]
    await executors[0].start()
    await executors[0].listen(address)
    async with symbiosis.connect(address, retry=30.0) as remote, remote.client(lora(), seed=0) as client:
        job = asyncio.create_task(run_job(client))
        await restart(address, executors, job)
        comparison = Comparison.of(await asyncio.wait_for(job, 60), expected)
    await executors[-1].close()
    assert comparison.bit_equal, comparison


async def test_synchronous_code_survives_a_restart(base: Any) -> None:
    expected = run_job_plain(base, lora())
    address = free_address()
    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(3)]
    await executors[0].start()
    await executors[0].listen(address)

    def tenant() -> Any:
        with symbiosis.open_model(address, retry=30.0) as model:
            return run_job_plain(model, lora())

    job = asyncio.create_task(in_thread(tenant))
    await restart(address, executors, job)
    comparison = Comparison.of(await asyncio.wait_for(job, 60), expected)
    await executors[-1].close()
    assert comparison.bit_equal, comparison


async def test_another_model_at_the_same_address_is_not_taken(base: Any) -> None:
    address = free_address()
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        remote = symbiosis.connect(address, retry=10.0)
        await remote.__aenter__()
        client = await remote.client().open()
        await client.forward(input_ids=IDS)
    async with symbiosis.Executor(tiny_model(seed=1)) as executor:
        await executor.listen(address)
        with pytest.raises(RefusedError, match="another model"):
            await asyncio.wait_for(client.forward(input_ids=IDS), 30)
        await remote.close()


async def test_a_killed_client_is_found(base: Any) -> None:
    """In the middle of a pass, so that batches would wait for the client."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        tenant = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGS, listener.address, stdout=subprocess.PIPE
        )
        assert tenant.stdout is not None
        await asyncio.wait_for(tenant.stdout.readline(), 60)
        assert len(executor.status()["clients"]) == 1
        tenant.kill()
        await until(lambda: not executor.status()["clients"] and not listener.lines, 3.0)  # type: ignore[attr-defined]
        await tenant.wait()


async def test_a_stopped_client_delays_others_by_a_second_at_most(base: Any) -> None:
    """In the middle of a pass, under a policy whose batches wait for all clients."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        listener = await executor.listen(LOCAL)
        tenant = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGS, listener.address, stdout=subprocess.PIPE
        )
        assert tenant.stdout is not None
        await asyncio.wait_for(tenant.stdout.readline(), 60)
        os.kill(tenant.pid, signal.SIGSTOP)
        async with executor.client() as client:
            out = await asyncio.wait_for(client.forward(input_ids=IDS), 1.0 + 5.0)
            assert torch.equal(out.logits, base(IDS).logits)
        assert len(executor.status()["clients"]) == 1  # its kernel answers: it may go on
        tenant.kill()
        await until(lambda: not executor.status()["clients"])
        await tenant.wait()


async def test_a_closed_model_and_a_forked_child(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)

        def tenant() -> str:
            with symbiosis.open_model(listener.address) as model, torch.no_grad():
                model(input_ids=IDS)
                reading, writing = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        model(input_ids=IDS)
                    except ClientClosedError as error:
                        os.write(writing, str(error).encode())
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
                os.close(writing)
                with os.fdopen(reading) as pipe:
                    told = pipe.read()
                model(input_ids=IDS)  # the parent goes on
            with pytest.raises(ClientClosedError):
                model(input_ids=IDS)
            return told

        assert "forked child" in await in_thread(tenant)


# ------------------------------------------------------------------------------------------------------ hostile clients


BAD = {
    "no message": [b"\xc1"],
    "empty": [b""],
    "too long": [bytes(wire.MAX_TO_EXECUTOR + 1)],
    "second hello": [hello("again")],
    "no tensors": [a_call(1)],
    "too many tensors": [a_call(1), rows(), rows()],
    "too few bytes": [a_call(1, 2), rows(1)],
    "no rows": [a_call(1, 0), b""],
    "more rows than there are bytes in the world": [a_call(1, 1 << 62), rows()],
    "tensors without a call": [wire.pack(Type.BEGIN), rows()],
    "answer": [wire.pack(Type.RESULT, 1)],
    "share at a wrong place": [wire.pack(Type.SHARE, 17)],
    "share beyond its end": [wire.pack(Type.SHARE, 1 << 40)],
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_messages_end_that_client_alone(base: Any, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            with raw(listener.address) as mallory:
                mallory.send(hello("mallory"))
                assert (await in_thread(receive, mallory))[0] is Type.WELCOME
                mallory.send(*BAD[what])
                type_, content = await in_thread(receive, mallory)
                assert type_ is Type.ENDED
                assert content[0] == "WireError"
                assert executor.status()["clients"] == ["alice"]
                await alice.forward(input_ids=IDS)
            await until(lambda: len(listener.lines) == 1)  # type: ignore[attr-defined]


async def test_an_unknown_layer_fails_that_call_alone(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as curious:
            curious.send(hello("curious"))
            await in_thread(receive, curious)
            curious.send(a_call(1, layer=999), rows())
            curious.send(a_call(2), rows())
            first, second = await in_thread(lambda: (receive(curious), receive(curious)))
    assert first[0] is Type.FAILED
    assert "there are 15" in first[1][2]
    assert second == (Type.RESULT, [2])


async def test_a_rejected_client_is_disconnected(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as mallory:
            mallory.send(b"?")
            assert (await in_thread(receive, mallory))[0] is Type.ENDED
            await until(lambda: not listener.lines)  # type: ignore[attr-defined]


FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(hello, st.one_of(st.none(), st.text(max_size=3))),
        st.builds(a_call, st.integers(0, 5), st.integers(0, 3), st.integers(0, 20)),
        st.builds(rows, st.integers(0, 3)),
        st.builds(lambda type_, *rest: wire.pack(type_, *rest), st.sampled_from(Type), st.integers(-1, 3)),
    ),
    min_size=1,
    max_size=4,
)


async def test_malformed_messages_affect_no_other_client(base: Any) -> None:
    with torch.no_grad():
        expected = base(IDS).logits
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)

        @settings(max_examples=60)
        @given(st.lists(FRAMES, min_size=1, max_size=6), st.booleans())
        def throw(messages: list[list[bytes]], polite: bool) -> None:
            with raw(listener.address) as mallory, contextlib.suppress(ConnectionError):
                if polite:
                    mallory.send(hello("mallory"))
                    assert receive(mallory)[0] in (Type.WELCOME, Type.ENDED)
                for frames in messages:
                    mallory.send(*frames)

        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            thrown = asyncio.create_task(in_thread(throw))
            while not thrown.done():
                out = await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
                torch.testing.assert_close(out.logits, expected)
            await thrown
            await until(lambda: executor.status()["clients"] == ["alice"])


async def test_a_peer_that_speaks_another_protocol_is_disconnected(base: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            async with symbiosis.connect(listener.address) as remote:
                assert (await remote.status())["clients"] == []
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_a_connection_without_hello_is_closed(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.transports.peer.HELLO_WITHIN_S", 0.1)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address):
            await until(lambda: listener.lines)  # type: ignore[attr-defined]
            await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_names_are_each_tenants_own(base: Any, keys: Path) -> None:
    """Two tenants may use the same name for a client."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = symbiosis.connect(listener.address, key=keys / "alice.secret")
        bob = symbiosis.connect(listener.address, key=keys / "bob.secret")
        async with alice, bob, alice.client(name="job") as hers, bob.client(name="job") as his:
            await asyncio.gather(hers.forward(input_ids=IDS), his.forward(input_ids=IDS))
            assert executor.status()["clients"] == ["alice/job", "bob/job"]


async def test_a_tenant_sees_its_own_clients(base: Any, keys: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = symbiosis.connect(listener.address, key=keys / "alice.secret")
        bob = symbiosis.connect(listener.address, key=keys / "bob.secret")
        async with alice, bob, alice.client(name="secret-project"), bob.client(name="job"):
            shown = await bob.status()
            assert (shown["clients"], shown["other_clients"]) == (["bob/job"], 1)
            look = make_transport(listener.address, key=keys / "bob.secret").look
            assert "secret-project" not in str((await in_thread(look, listener.address)).status)


async def test_a_burst_of_connections_while_the_executor_is_busy(base: Any, keys: Path) -> None:
    """All of them wait in the kernel's queue until the executor has time."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        burst = [socket.create_connection(resolve(listener.address), 1.0) for _ in range(300)]
        await until(lambda: len(listener.lines) == 300)  # type: ignore[attr-defined]
        for client in burst:
            client.close()
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_hello_is_said_once(base: Any) -> None:
    """Each is answered with the tokenizer's files: enough of them would be a lot."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as mallory:
            mallory.send(hello(None))
            assert (await in_thread(receive, mallory))[0] is Type.WELCOME
            mallory.send(hello(None))
            type_, content = await in_thread(receive, mallory)
            assert (type_, content[1]) == (Type.ENDED, "the client sent a second HELLO on one connection")


async def test_a_status_connection_ends(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.transports.peer.LOOK_WITHIN_S", 0.5)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as idle:
            idle.send(hello(None))
            assert (await in_thread(receive, idle))[0] is Type.WELCOME
            await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_clients_of_a_tenant_are_counted(base: Any, keys: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys, limits=Limits(clients=1))
        async with symbiosis.connect(listener.address, key=keys / "alice.secret") as remote, remote.client():
            with pytest.raises(RefusedError, match="alice has 1 connections here already"):
                await remote.client().open()
            async with symbiosis.connect(listener.address, key=keys / "bob.secret") as other, other.client() as bob:
                await bob.forward(input_ids=IDS)


async def test_a_client_at_its_limits_waits_and_other_clients_do_not(base: Any) -> None:
    """A client of ours keeps to the limits: it may ask for any number of calls, and gets them one after another."""
    limits = Limits(calls=4, rows=64)
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        listener = await executor.listen(LOCAL, limits=limits)
        channel = await make_transport(listener.address).connect(listener.address, "greedy")
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            x = torch.randn(20, 32)
            replies = [channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))) for _ in range(300)]
            for _ in range(3):
                await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
                assert executor.status()["outstanding"] <= limits.calls + 1
            results = await asyncio.wait_for(asyncio.gather(*replies), 30)
            (wanted,) = results[0]
            assert all(torch.equal(result, wanted) for (result,) in results)
        channel.close()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
async def test_a_client_that_floods_is_disconnected_and_other_clients_are_served(base: Any, reads: bool) -> None:
    limits = Limits(calls=4, arena_bytes=64 << 20)
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        listener = await executor.listen(LOCAL, limits=limits)

        def mallory() -> int:
            sent = 0
            with raw(listener.address) as socket:
                socket.send(hello("mallory"))
                receive(socket)
                socket.socket.settimeout(2.0)
                while sent < 20_000:
                    try:
                        socket.send(a_call(sent, 200), rows(200))
                    except OSError:
                        break  # the executor has stopped reading, as it must, or has ended the connection
                    sent += 1
                    while reads and socket.poll():
                        receive(socket)
            return sent

        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            flood = asyncio.create_task(in_thread(mallory))
            await asyncio.sleep(0.05)
            while not flood.done():
                await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
                assert executor.status()["outstanding"] <= limits.calls + 1
            assert flood.result() > 4
            await until(lambda: executor.status()["clients"] == ["alice"])


ENDLESS = {
    "a message": (False, lambda: [(1 << 30).to_bytes(4, "little") + bytes(8)]),
    "a payload before HELLO": (False, lambda: [len(hello("m")).to_bytes(4, "little") + b"\xff" * 8 + hello("m")]),
    "a payload of no call": (True, lambda: [len(wire.PING).to_bytes(4, "little") + b"\xff" * 8 + wire.PING]),
    "a payload of a call": (True, lambda: [len(a_call(1)).to_bytes(4, "little") + b"\xff" * 7 + b"\0" + a_call(1)]),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_refused_at_once(base: Any, what: str) -> None:
    """Nothing is allocated for it, and nothing of it is waited for."""
    said_hello, data = ENDLESS[what]
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as mallory:
            if said_hello:
                mallory.send(hello("mallory"))
                assert (await in_thread(receive, mallory))[0] is Type.WELCOME
            mallory.socket.sendall(b"".join(data()))
            type_, content = await in_thread(receive, mallory)
            assert (type_, content[0]) == (Type.ENDED, "WireError")
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x40\x00" + bytes(200)], ids=["nothing", "little", "some"]
)
async def test_a_handshake_without_end(base: Any, keys: Path, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        with socket.create_connection(resolve(listener.address)) as mallory:
            mallory.sendall(sent)
            began = time.monotonic()
            await until(lambda: refusals(caplog), 5.0)
            assert time.monotonic() - began < 3.0
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_a_handshake_while_the_executor_is_busy(base: Any, keys: Path) -> None:
    """What came in time counts, however late the executor reads it."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        joining = asyncio.create_task(in_thread(raw, listener.address, keys / "alice.secret"))
        for _ in range(3):
            await asyncio.sleep(0.001)
            time.sleep(1.5)  # noqa: ASYNC251 (a long batch)
        with await joining as alice:
            alice.send(hello("a"))
            assert (await in_thread(receive, alice))[0] is Type.WELCOME


async def test_a_call_too_large_for_the_limits(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, limits=Limits(arena_bytes=1 << 16))
        async with symbiosis.connect(listener.address) as remote, remote.client() as client:
            with pytest.raises(UsageError, match="arena_bytes"):
                await client.forward(input_ids=IDS.repeat(200, 1))
            await client.forward(input_ids=IDS)
        with raw(listener.address) as mallory:
            mallory.send(hello("mallory"))
            await in_thread(receive, mallory)
            mallory.send(a_call(1, 1024), rows(1024))
            await until(lambda: not executor.status()["clients"])


async def test_results_count_before_anything_runs(base: Any) -> None:
    """The rows of a call fit into the limit, its results do not: a head with a large vocabulary multiplies them."""
    async with symbiosis.Executor(base) as executor:
        head = next(spec for spec in executor.layers if spec.name == "lm_head")
        listener = await executor.listen(LOCAL, limits=Limits(arena_bytes=1 << 20))
        with raw(listener.address) as mallory:
            mallory.send(hello("mallory"))
            await in_thread(receive, mallory)
            mallory.send(a_call(1, 4096, layer=head.layer), rows(4096))
            type_, content = await in_thread(receive, mallory)
            assert (type_, content[0]) == (Type.ENDED, "WireError")
            assert "1572864 bytes of tensors and results are outstanding; at most 1048576 are allowed" in content[1]
        assert executor.status()["rows"] == 0


async def test_training_leaves_nothing_behind(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        async with symbiosis.connect(listener.address) as remote:
            async with remote.client(lora()) as client:
                optimizer = adamw(client.model)
                for _ in range(3):
                    await client.train_step(BATCH, optimizer)
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]
        await asyncio.sleep(0)
