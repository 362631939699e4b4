"""Tests of ``tcp://`` with limits and with clients that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import RefusedError, UsageError, WireError
from symbiosis.executor.service import ACTIVITY_EVERY_S
from symbiosis.transports import stream_line, tcp_listener, wire
from symbiosis.transports.limits import Limits
from symbiosis.transports.sockets import resolve
from symbiosis.transports.stream import MAX_OF_TLS
from symbiosis.transports.wire import Type
from tests.helpers import BATCH, IDS, adamw, in_thread, lora, until
from tests.transports.raw import a_call, hello, key_updates, raw, receive, rows, violate

LOCAL = "tcp://127.0.0.1:0"


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
async def test_bad_messages_end_the_connection_of_that_client_only(base: Any, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await violate(listener.address, *BAD[what])
            await until(lambda: executor.status()["clients"] == ["alice"])
            await alice.forward(input_ids=IDS)
            await until(lambda: len(listener.lines) == 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_client_closes_a_connection_that_the_executor_has_ended(
    base: Any, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_line, "GOODBYE_S", 1e6)  # the executor does not close it
    async with symbiosis.Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        listener: Any = await executor.listen(LOCAL)
        if blocking:
            opened = symbiosis.open_model(listener.address, retry=60.0)
            use = partial(in_thread, await in_thread(opened.__enter__), IDS)
        else:
            remote = await stack.enter_async_context(symbiosis.connect(listener.address, retry=60.0))
            use = partial((await stack.enter_async_context(remote.client())).forward, input_ids=IDS)
        await use()
        for line in listener.lines:
            line.peer.refuse(WireError("enough"))
        with pytest.raises(WireError, match="enough"):
            await use()
        await until(lambda: not listener.lines)


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


@asynccontextmanager
async def two_tenants(base: Any, keys: Path, hers: str = "job") -> AsyncIterator[tuple[Any, Any, Any, Any, Any]]:
    """An executor, its address, bob's connection, and a client each of alice and bob."""
    async with symbiosis.Executor(base, policy="fair:weights.alice=2+co-serving:clients.alice/job=50/900") as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        alice = symbiosis.connect(listener.address, key=keys / "alice.secret")
        bob = symbiosis.connect(listener.address, key=keys / "bob.secret")
        async with alice, bob, alice.client(name=hers) as one, bob.client(name="job") as other:
            yield executor, listener.address, bob, one, other


async def test_names_belong_to_each_tenant(base: Any, keys: Path) -> None:
    """Two tenants may use the same name for a client."""
    async with two_tenants(base, keys) as (executor, _, _, hers, his):
        await asyncio.gather(hers.forward(input_ids=IDS), his.forward(input_ids=IDS))
        assert executor.status()["clients"] == ["alice/job", "bob/job"]


async def test_a_tenant_sees_its_own_clients_only(base: Any, keys: Path) -> None:
    async with two_tenants(base, keys, "secret-project") as (_, address, bob, _, _):
        shown = await bob.status()
        assert (shown["clients"], shown["other_clients"], shown["policy"]) == (["bob/job"], 1, "fair+co-serving")
        assert "alice" not in str(shown)
        look = make_transport(address, key=keys / "bob.secret").look
        assert "secret-project" not in str((await in_thread(look, address)).status)


async def test_a_tenant_sees_its_own_activity_only(base: Any, keys: Path) -> None:
    async with two_tenants(base, keys) as (executor, _, bob, hers, his):
        await asyncio.gather(hers.forward(input_ids=IDS), his.forward(input_ids=IDS))
        await asyncio.sleep(ACTIVITY_EVERY_S)
        everything = executor.status()["activity"]
        assert everything["tenants"].keys() == {"alice", "bob"}
        assert everything["layers"]
        shown = (await bob.status())["activity"]
        assert shown["tenants"]["bob"]["requests"] == executor.statistics().tenants["bob"].requests > 0
        assert shown["tenants"]["bob"]["held_bytes"] > 0
        assert "alice" not in str(shown)
        assert not shown["layers"], "layers that run tell what other tenants do"
        assert not shown["apart"]
        status = await bob.status()
        own = executor.statistics().tenants["bob"]
        assert (status["requests"], status["rows"]) == (own.requests, own.rows)
        assert (shown["batches"], shown["run_s"]) == (own.requests, 0.0)
        sums = {"batches", "mean_batch", "run_s", "outstanding", "held_bytes", "free_bytes", "addresses"}
        assert not sums & status.keys(), "their changes tell when others send how many tokens"
        assert sums < executor.status().keys()


async def test_a_burst_of_connections_while_the_executor_is_busy(base: Any) -> None:
    """All of the connections wait in the kernel's queue until the executor accepts them."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, limits=Limits(clients=300))
        burst = [socket.create_connection(resolve(listener.address), 1.0) for _ in range(300)]
        await until(lambda: len(listener.lines) == 300)  # type: ignore[attr-defined]
        for client in burst:
            client.close()
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_hello_is_sent_once(base: Any) -> None:
    """Each HELLO is answered with the tokenizer's files, so many of them would fill the memory."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL)
        with raw(listener.address) as mallory:
            mallory.send(hello(None))
            assert (await in_thread(receive, mallory))[0] is Type.WELCOME
            mallory.send(hello(None))
            type_, content = await in_thread(receive, mallory)
            assert (type_, content[1]) == (Type.ENDED, "the client sent a second HELLO on one connection")


async def test_a_status_connection_ends(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.transports.stream_line.LOOK_WITHIN_S", 0.5)
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
            with pytest.raises(RefusedError, match="alice has 1 clients here already"):
                await remote.client().open()
            async with symbiosis.connect(listener.address, key=keys / "bob.secret") as other, other.client() as bob:
                await bob.forward(input_ids=IDS)


async def test_connections_of_a_tenant_are_counted_before_their_hello(
    base: Any, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_listener, "LOOKS_OF_ONE", 2)
    monkeypatch.setattr(stream_line, "MAX_CONNECTIONS", 4)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys, limits=Limits(clients=1))
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(await in_thread(raw, listener.address, keys / "alice.secret"))
            for _ in range(3):
                with await in_thread(raw, listener.address, keys / "alice.secret") as another:
                    type_, content = await in_thread(receive, another)
                    assert (type_, content[0]) == (Type.ENDED, "BusyError")
            async with symbiosis.connect(listener.address, key=keys / "bob.secret", retry=0) as remote:
                assert await remote.status()


async def test_looks_are_counted_apart_from_clients(base: Any) -> None:
    """A client begins with a look at the executor, whose connection may be open still when the client joins."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, limits=Limits(clients=1))

        def look() -> Any:
            socket = raw(listener.address)
            socket.send(hello(None))
            return socket, receive(socket)[0]

        async def looks(count: int) -> list[Any]:
            return [await in_thread(look) for _ in range(count)]

        with contextlib.ExitStack() as stack:
            first = await looks(1)
            stack.enter_context(first[0][0])
            async with symbiosis.connect(listener.address) as remote, remote.client() as alice:
                await alice.forward(input_ids=IDS)
                many = await looks(tcp_listener.LOOKS_OF_ONE)
                for socket, _ in many:
                    stack.enter_context(socket)
                assert [type_ for _, type_ in many] == [Type.WELCOME] * (len(many) - 1) + [Type.ENDED]


async def test_a_client_at_its_limits_waits_and_other_clients_do_not(base: Any) -> None:
    """A regular client keeps to the limits: it may make any number of calls, and gets the results one after another."""
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
async def test_a_client_that_floods_waits_and_other_clients_are_served(base: Any, reads: bool) -> None:
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
                        break  # the executor has stopped reading, as required, or has ended the connection
                    sent += 1
                    while reads and socket.poll():
                        socket.socket.recv(1 << 20)
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
async def test_endless_input_is_refused_at_once(base: Any, what: str) -> None:
    """The executor allocates no memory for it, and does not wait for more of it."""
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
async def test_an_endless_handshake(base: Any, keys: Path, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, keys=keys)
        with socket.create_connection(resolve(listener.address)) as mallory:
            mallory.sendall(sent)
            await until(lambda: any("more than 1 s" in str(getattr(one, "why", "")) for one in caplog.records))
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["tcp", "dist"])
async def test_a_handshake_has_64_kib(
    base: Any, keys: Path, scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS allows a ClientHello of 128 KiB in parts, which a peer without a key can send."""
    monkeypatch.setattr(tcp_listener, "HANDSHAKE_S", 60.0)
    opening = b"\x01\x01\xf0\x00" + bytes(80 << 10)
    parts = [opening[start : start + 8192] for start in range(0, len(opening), 8192)]
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(
            f"{scheme}://127.0.0.1:0", keys=keys, **({"insecure": True} if scheme == "dist" else {})
        )
        with socket.create_connection(resolve(listener.address)) as mallory:
            with contextlib.suppress(ConnectionError):
                mallory.sendall(b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts))
            await until(lambda: any("no end of the TLS handshake" in str(vars(one)) for one in caplog.records))
        await until(lambda: not listener.lines)


async def test_requests_for_new_tls_keys_end_the_connection(base: Any, keys: Path, tmp_path: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL, keys=keys)
        mallory = await in_thread(raw, listener.address, keys / "alice.secret", tmp_path / "log")
        with mallory:
            mallory.socket.sendall(key_updates(tmp_path / "log", "CLIENT", MAX_OF_TLS // 20))
            type_, content = await in_thread(receive, mallory)
        assert type_ is Type.ENDED
        assert "new TLS keys" in content[1]
        await until(lambda: not listener.lines)


async def test_a_handshake_while_the_executor_is_busy(base: Any, keys: Path) -> None:
    """Bytes that arrived in time count, even if the executor reads them late."""
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
    """The rows of a call are within the limit and its results are not: the head has far more columns than its input."""
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
        await until(lambda: not executor.service.budget.held)
        assert executor.engine.scheduler.outstanding == 0
