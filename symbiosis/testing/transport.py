"""A conformance kit for transports: subclass :class:`TransportConformance`, define an address, and inherit the tests.

::

    class TestMine(TransportConformance):
        def address(self, folder: Path) -> str:
            return f"mine://{folder}/socket"

Run it with pytest and ``pytest-asyncio`` in auto mode. The tests start a real executor with layers of several dtypes
and widths at the address, make calls through the transport's channels, and compare the results with the layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.testing import assert_close

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.core.transport import Channel, Identity, Session
from symbiosis.errors import BrokenError, ClientClosedError, PeerError, PrivacyError, SymbiosisError, UsageError
from symbiosis.executor.layers import base_layer
from symbiosis.host import Executor
from symbiosis.testing.models import tiny_model
from symbiosis.testing.zoo import zoo_model
from symbiosis.transports.limits import Limits

WITHIN_S = 30.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_names = itertools.count(1)


def _model() -> Any:
    """Return a model whose linear layers have all dtypes in turn."""
    model = tiny_model("llama", num_hidden_layers=2)
    block = model.model.layers[1]
    linears = (block.self_attn.q_proj, block.self_attn.o_proj, block.mlp.gate_proj, block.mlp.down_proj)
    for module, dtype in zip(linears, DTYPES, strict=True):
        module.to(dtype)
    return model


class TransportConformance:
    """Tests that every transport must pass. Override :meth:`address` and, if needed, the options."""

    blocking = True
    """Whether the transport has channels for synchronous code and for other processes."""
    reconnects = True
    """Whether a client waits, ``retry`` seconds, for an executor that was lost."""

    def address(self, folder: Path) -> str:
        """Return a free address. ``folder`` belongs to the test alone."""
        raise NotImplementedError

    def listen_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of the listening side."""
        return {}

    def connect_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of clients. A transport whose channels do not reconnect leaves out ``retry``.

        Another process gets the options as JSON, and paths as texts.
        """
        return {"retry": 0.0}

    async def throw(self, address: str, data: bytes) -> None:
        """Connect to the listener as an unauthenticated peer, send bytes and disconnect."""
        raise NotImplementedError

    @asynccontextmanager
    async def _executor(
        self, folder: Path, policy: str | Policy = "no-lockstep", model: Any = None, base_layers: str = "linear"
    ) -> AsyncIterator[tuple[Executor, str]]:
        async with Executor(model or _model(), policy=policy, base_layers=base_layers) as executor:
            address = self.address(folder)
            listener = await executor.listen(address, **self.listen_options(folder))
            yield executor, listener.address

    @asynccontextmanager
    async def _channel(
        self, address: str, folder: Path, terms: Terms = NO_TERMS, *, blocking: bool = False, **options: Any
    ) -> AsyncIterator[Channel]:
        """Open a channel, for synchronous code if ``blocking``. ``options`` replace those of clients."""
        transport = make_transport(address, **{**self.connect_options(folder), **options})
        given = address, f"client-{next(_names)}", terms
        opening = asyncio.to_thread(transport.connect_blocking, *given) if blocking else transport.connect(*given)
        channel = await asyncio.wait_for(opening, WITHIN_S)
        try:
            yield channel
        finally:
            if blocking:
                await asyncio.to_thread(channel.close)
            else:
                channel.close()

    @staticmethod
    def _call(
        executor: Executor, layers: tuple[int, ...], pass_: Pass, rows: int, seed: int = 0, *, fp32: bool = False
    ) -> Call:
        spec = executor.layers[layers[0]]
        width = spec.out_features if pass_.is_backward else spec.in_features
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if fp32 else spec.dtype
        x = torch.randn(rows, width, generator=generator, dtype=torch.float32).to(dtype)
        return Call(Key(layers, pass_, fp32), Kind.FINETUNE, (x,))

    @staticmethod
    def _expected(executor: Executor, call: Call) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            base = executor.service.resident()
            found = [
                base_layer(layer, base.layers[layer][0].name, base.layers[layer][1], config=base.model.config)
                for layer in call.key.layers
            ]
            return tuple(result for layer in found for result in layer.run(call.key, call.tensors))

    @staticmethod
    def _send(channel: Channel, call: Call, blocking: bool) -> asyncio.Future[Any]:
        """Send a call, from a thread if ``blocking``."""
        return asyncio.ensure_future(asyncio.to_thread(channel.call, call) if blocking else channel.send(call))

    async def _check(self, executor: Executor, channel: Channel, call: Call, *, blocking: bool = False) -> None:
        results = await asyncio.wait_for(self._send(channel, call, blocking), WITHIN_S)
        expected = self._expected(executor, call)
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected, strict=True):
            assert_close(result, wanted)

    @staticmethod
    async def _until(condition: Any) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)

    async def test_every_layer_dtype_and_pass(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            assert [tuple(spec) for spec in channel.layers] == [tuple(spec) for spec in executor.layers]
            assert {spec.dtype for spec in channel.layers} == set(DTYPES)
            for spec in executor.layers:
                for pass_, fp32 in itertools.product(Pass, (False, True)):
                    await self._check(executor, channel, self._call(executor, (spec.layer,), pass_, 3, fp32=fp32))

    @pytest.mark.parametrize("rows", [1, 2, 17, 1000])
    async def test_shapes(self, tmp_path: Path, rows: int) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            for pass_ in Pass:
                await self._check(executor, channel, self._call(executor, (0,), pass_, rows))

    async def test_huge_and_small_in_turn(self, tmp_path: Path) -> None:
        """Send 16 MiB each way, then a row, then more: the memory of the transport must grow and be reused."""
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            width = executor.layers[0].in_features
            rows = (16 << 20) // (4 * width)
            for count in (1, rows, 1, rows, rows // 2, 1):
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, count))

    async def test_siblings_answer_together(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            group = _siblings(executor.layers)
            await self._check(executor, channel, self._call(executor, group, Pass.FORWARD, 5))

    @pytest.mark.parametrize("base_layers", ["linear", "mlp"])
    async def test_calls_of_several_tensors(self, tmp_path: Path, base_layers: str) -> None:
        """A bank of experts takes rows, numbers of experts, weights, and a gradient; an MLP rows and a gradient."""
        model = zoo_model("MixtralForCausalLM") if base_layers == "linear" else tiny_model("llama")
        async with (
            self._executor(tmp_path, model=model, base_layers=base_layers) as (executor, address),
            self._channel(address, tmp_path) as channel,
        ):
            spec = next(spec for spec in channel.layers if not spec.linear)
            assert bool(spec.experts) == (base_layers == "linear")
            for pass_ in (Pass.FORWARD, Pass.BACKWARD):
                key = Key((spec.layer,), pass_, choices=spec.choices)
                tensors = tuple(
                    torch.randn(5, width).to(dtype) if dtype.is_floating_point else torch.arange(5 * width).view(5, -1)
                    for width, dtype in expected(channel.layers, key).call
                )
                tensors = tuple(t if t.is_floating_point() else t % spec.experts for t in tensors)
                await self._check(executor, channel, Call(key, Kind.FINETUNE, tensors))

    async def test_rows_in_any_layout(self, tmp_path: Path) -> None:
        """Rows need not be contiguous in memory."""
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            rows = torch.randn(executor.layers[0].in_features, 8)
            for layout in (rows.t(), rows.t()[::2], rows.t()[:1].expand(3, -1)):
                await self._check(executor, channel, Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (layout,)))

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_what_the_executor_hears(self, tmp_path: Path, blocking: bool) -> None:
        """A client's terms, its walks, and the kinds of its calls."""
        if blocking and not self.blocking:
            pytest.skip("it has no blocking clients")
        async with self._executor(tmp_path) as (executor, address):
            heard = _hear(executor)
            join = executor.service.join

            def heard_join(client: str, terms: Terms = NO_TERMS, **named: Any) -> Any:
                heard.append(("join", terms))
                return join(client, terms, **named)

            executor.service.join = heard_join  # type: ignore[method-assign]
            terms = Terms(priority=-3, slo_ms=2e4, ttft_ms=3e4, kind=Kind.PREFILL)
            calls = [replace(self._call(executor, (0,), Pass.FORWARD, 2), kind=kind) for kind in Kind]
            async with self._channel(address, tmp_path, terms, blocking=blocking) as channel:

                def walk() -> None:
                    channel.begin_walk()
                    for call in calls:
                        channel.call(call)
                    channel.end_walk()

                if blocking:
                    await asyncio.wait_for(asyncio.to_thread(walk), WITHIN_S)
                else:
                    channel.begin_walk()
                    for call in calls:
                        await self._check(executor, channel, call)
                    channel.end_walk()
                await self._until(lambda: heard[-1] == ("end_walk",))
            assert heard[0] == ("join", terms)
            assert heard[1] == ("begin_walk",)
            asked = [call for name, *given in heard if name in ("at_once", "submit") for call in given]
            assert [call.kind for call, _ in itertools.groupby(asked)] == list(Kind)

    async def test_a_cancelled_call_does_not_run(self, tmp_path: Path) -> None:
        policy = _Hold()
        async with self._executor(tmp_path, policy) as (executor, address), self._channel(address, tmp_path) as channel:
            call = self._call(executor, (0,), Pass.FORWARD, 3)
            reply = channel.send(call)
            if isinstance(reply, asyncio.Future):  # asyncio reports errors that no caller sees
                reply.add_done_callback(lambda done: done.cancelled() or done.exception())
            await self._until(lambda: executor.status()["outstanding"] == 1)
            channel.cancel(call)
            await self._until(lambda: executor.status()["outstanding"] == 0)
            policy.holds = False
            await self._check(executor, channel, self._call(executor, (1,), Pass.FORWARD, 2))
            assert policy.layers == [(1,)]

    async def test_an_interrupted_call_does_not_run(self, tmp_path: Path) -> None:
        """A call for which a thread waits ends with the error of the interruption."""
        policy = _Hold()
        async with self._executor(tmp_path, policy) as (executor, address), self._channel(address, tmp_path) as channel:
            call = self._call(executor, (0,), Pass.BACKWARD, 3)
            waiting = asyncio.create_task(asyncio.to_thread(channel.call, call))
            await self._until(lambda: executor.status()["outstanding"] == 1)
            channel.interrupt(ClientClosedError("interrupted"))
            with pytest.raises(ClientClosedError, match="interrupted"):
                await asyncio.wait_for(waiting, WITHIN_S)
            await self._until(lambda: executor.status()["outstanding"] == 0)
            policy.holds = False
            await self._check(executor, channel, self._call(executor, (1,), Pass.FORWARD, 2))
            assert policy.layers == [(1,)]

    async def test_results_are_the_clients_own(self, tmp_path: Path) -> None:
        """A result keeps its values during later calls, and may be written to."""
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            call = self._call(executor, (0,), Pass.FORWARD, 4)
            (kept,) = await asyncio.wait_for(channel.send(call), WITHIN_S)
            for seed in range(5):
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 4, seed=seed + 1))
            assert_close(kept, self._expected(executor, call)[0])
            kept.zero_()
            await self._check(executor, channel, call)

    async def test_many_at_once_keep_their_answers(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            calls = [self._call(executor, (seed % 7,), Pass.FORWARD, 1 + seed % 5, seed=seed) for seed in range(40)]
            replies = [channel.send(call) for call in calls]
            for call, reply in zip(calls, replies, strict=True):
                results = await asyncio.wait_for(reply, WITHIN_S)
                assert_close(results[0], self._expected(executor, call)[0])

    async def test_many_clients(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address):

            async def client(number: int) -> None:
                async with self._channel(address, tmp_path) as channel:
                    channel.begin_walk()
                    for turn in range(10):
                        call = self._call(executor, (turn,), Pass.FORWARD, 1 + number, seed=100 * number + turn)
                        await self._check(executor, channel, call)
                    channel.end_walk()

            await asyncio.gather(*[client(number) for number in range(6)])
            await self._until(lambda: not executor.status()["clients"])

    async def test_limits_that_change(self, tmp_path: Path) -> None:
        """An executor that changes its limits goes on with its clients, and admits others."""
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            executor.limit(Limits(calls=32), 1 << 30)
            await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 4))
            async with self._channel(address, tmp_path) as newcomer:
                await self._check(executor, newcomer, self._call(executor, (0,), Pass.FORWARD, 4))

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_a_wrong_call_is_refused_and_the_next_one_served(self, tmp_path: Path, blocking: bool) -> None:
        if blocking and not self.blocking:
            pytest.skip("it has no blocking clients")
        async with (
            self._executor(tmp_path) as (executor, address),
            self._channel(address, tmp_path, blocking=blocking) as channel,
        ):
            good = self._call(executor, (0,), Pass.FORWARD, 2)
            width = executor.layers[0].in_features
            wrong = [
                Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.zeros(0, width),)),
                Call(Key((0, 0), Pass.FORWARD), Kind.DECODE, (torch.zeros(1, width),)),
            ]
            for call in wrong:
                with pytest.raises(SymbiosisError):
                    await asyncio.wait_for(self._send(channel, call, blocking), WITHIN_S)
            await self._check(executor, channel, good, blocking=blocking)

    @pytest.mark.parametrize("turns", range(6))
    async def test_cancelled_at_any_moment(self, tmp_path: Path, turns: int) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            for seed in range(3):
                call = self._call(executor, (0,), Pass.FORWARD, 300, seed=seed)
                reply = channel.send(call)
                for _ in range(turns):
                    await asyncio.sleep(0)
                if reply.done():
                    assert_close(reply.result()[0], self._expected(executor, call)[0])
                else:
                    channel.cancel(call)
                await self._check(executor, channel, self._call(executor, (1,), Pass.FORWARD, 2, seed=seed))
            await self._until(lambda: executor.status()["outstanding"] == 0)

    async def test_a_client_that_leaves_is_forgotten(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address):
            async with self._channel(address, tmp_path) as channel:
                channel.begin_walk()
                reply = channel.send(self._call(executor, (0,), Pass.FORWARD, 50))
            await self._until(lambda: not executor.status()["clients"] and executor.status()["outstanding"] == 0)
            with contextlib.suppress(SymbiosisError, asyncio.CancelledError):
                await asyncio.wait_for(reply, WITHIN_S)
            async with self._channel(address, tmp_path) as channel:
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2))

    async def test_a_name_is_one_clients_alone(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            transport = make_transport(address, **self.connect_options(tmp_path))
            with pytest.raises((PeerError, UsageError), match=channel.client):
                await asyncio.wait_for(transport.connect(address, channel.client), WITHIN_S)
            await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2))

    async def test_an_executor_that_closes_ends_every_call(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            replies = [channel.send(self._call(executor, (0,), Pass.FORWARD, 400)) for _ in range(8)]
            await executor.close()
            for reply in replies:
                with contextlib.suppress(PeerError, BrokenError):
                    await asyncio.wait_for(reply, WITHIN_S)
            with pytest.raises((PeerError, BrokenError)):
                await asyncio.wait_for(channel.send(self._call_like(channel)), WITHIN_S)

    @pytest.mark.parametrize("ms", [0, 1, 3, 10, 30])
    async def test_cancelled_while_it_opens(self, tmp_path: Path, ms: int) -> None:
        """A client that gives up while it joins leaves no session behind."""
        async with self._executor(tmp_path) as (executor, address):
            transport = make_transport(address, **self.connect_options(tmp_path))
            for _ in range(5):
                with contextlib.suppress(TimeoutError):
                    (await asyncio.wait_for(transport.connect(address, f"client-{next(_names)}"), ms / 1e3)).close()
            await self._until(lambda: not executor.status()["clients"])
            async with self._channel(address, tmp_path) as channel:
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2))

    async def test_a_killed_client_is_forgotten(self, tmp_path: Path) -> None:
        """``kill -9`` in the middle of a walk, in which batches would wait for the client."""
        if not self.blocking:
            pytest.skip("it has no blocking clients")
        async with self._executor(tmp_path) as (executor, address):
            options = json.dumps(self.connect_options(tmp_path), default=str)
            victim = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _VICTIM, address, options, stdout=asyncio.subprocess.PIPE
            )
            assert victim.stdout is not None
            await asyncio.wait_for(victim.stdout.readline(), WITHIN_S)
            assert len(executor.status()["clients"]) == 1
            victim.kill()
            await victim.wait()
            await self._until(lambda: not executor.status()["clients"])

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_an_executor_that_comes_back(self, tmp_path: Path, blocking: bool) -> None:
        """Calls that were outstanding are answered by the next executor of the same model."""
        if not self.reconnects or (blocking and not self.blocking):
            pytest.skip("its clients do not come back")
        policy = _Hold()
        policy.holds = False
        async with contextlib.AsyncExitStack() as stack:
            async with self._executor(tmp_path, policy) as (executor, address):
                opened = self._channel(address, tmp_path, blocking=blocking, retry=WITHIN_S)
                channel = await stack.enter_async_context(opened)
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2), blocking=blocking)
                policy.holds = True
                calls = [self._call(executor, (0,), Pass.FORWARD, 200, seed=seed) for seed in range(4)]
                replies = [self._send(channel, call, blocking) for call in calls]
                await self._until(lambda: executor.status()["outstanding"] >= (1 if blocking else 4))
            async with Executor(_model(), policy="no-lockstep") as again:
                await again.listen(address, **self.listen_options(tmp_path))
                for call, reply in zip(calls, replies, strict=True):
                    (result,) = await asyncio.wait_for(reply, WITHIN_S)
                    assert_close(result, self._expected(again, call)[0])

    @pytest.mark.parametrize("blocking", [False, True])
    @pytest.mark.parametrize("same_model", [True, False])
    async def test_an_executor_that_may_not_come_back(self, tmp_path: Path, same_model: bool, blocking: bool) -> None:
        """An executor of another model, or one that a check refuses, gets no call: none that was outstanding, and none
        that is made later."""
        if not self.reconnects or (blocking and not self.blocking):
            return
        checked: list[Identity] = []

        def check(identity: Identity) -> None:
            checked.append(identity)
            raise PrivacyError("refused by a check")

        model = _model()
        async with contextlib.AsyncExitStack() as stack:
            async with self._executor(tmp_path, _Hold()) as (executor, address):
                opened = self._channel(address, tmp_path, blocking=blocking, retry=WITHIN_S)
                channel = await stack.enter_async_context(opened)
                if same_model:
                    channel.before_return(check)
                else:
                    model.model.layers[0].self_attn.q_proj.weight.data.add_(1.0)
                call = self._call(executor, (0,), Pass.FORWARD, 2)
                outstanding = self._send(channel, call, blocking)
                await self._until(lambda: executor.status()["outstanding"] == 1)
            async with Executor(model, policy="no-lockstep") as again:
                heard = _hear(again)
                await again.listen(address, **self.listen_options(tmp_path))
                errors: Any = PrivacyError if same_model else (PeerError, BrokenError)
                with pytest.raises(errors):
                    await asyncio.wait_for(outstanding, WITHIN_S)
                with pytest.raises(errors):
                    await asyncio.wait_for(self._send(channel, call, blocking), WITHIN_S)
                assert heard == []
                assert set(checked) == ({again.service.identity()} if same_model else set())

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_patience_ends(self, tmp_path: Path, blocking: bool) -> None:
        """Calls end in time and with a reason if the executor does not come back."""
        if not self.reconnects or (blocking and not self.blocking):
            pytest.skip("its clients do not come back")
        async with contextlib.AsyncExitStack() as stack:
            async with self._executor(tmp_path) as (executor, address):
                opened = self._channel(address, tmp_path, blocking=blocking, retry=0.3)
                channel = await stack.enter_async_context(opened)
                await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2), blocking=blocking)
            with pytest.raises(BrokenError, match="did not come back within"):
                await asyncio.wait_for(self._send(channel, self._call_like(channel), blocking), WITHIN_S)

    @pytest.mark.parametrize("data", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, bytes(range(256)) * 50])
    async def test_malformed_data_from_unauthenticated_peers(self, tmp_path: Path, data: bytes) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            try:
                for _ in range(3):
                    await self.throw(address, data)
            except NotImplementedError:
                pytest.skip("this transport's test does not implement throw()")
            await self._check(executor, channel, self._call(executor, (0,), Pass.FORWARD, 2))
            await self._until(lambda: executor.status()["clients"] == [_full_name(executor, channel)])

    async def test_no_executor_at_the_address(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (_, address):
            pass
        with pytest.raises((PeerError, BrokenError)):
            async with self._channel(address, tmp_path):
                pass

    async def test_calls_from_a_thread(self, tmp_path: Path) -> None:
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as channel:
            call = self._call(executor, (0,), Pass.BACKWARD, 7)
            results = await asyncio.wait_for(asyncio.to_thread(channel.call, call), WITHIN_S)
            assert_close(results[0], self._expected(executor, call)[0])

    async def test_synchronous_clients(self, tmp_path: Path) -> None:
        """Synchronous clients make calls on their own threads, beside a coroutine client."""
        if not self.blocking:
            transport = make_transport(self.address(tmp_path))
            with pytest.raises(UsageError):
                transport.connect_blocking(self.address(tmp_path), "client")
            return
        async with self._executor(tmp_path) as (executor, address), self._channel(address, tmp_path) as other:

            def client(number: int) -> None:
                transport = make_transport(address, **self.connect_options(tmp_path))
                with contextlib.closing(transport.connect_blocking(address, f"thread-{number}")) as channel:
                    channel.begin_walk()
                    for turn in range(10):
                        pass_ = Pass.FORWARD if turn % 2 else Pass.BACKWARD
                        call = self._call(executor, (turn,), pass_, 1 + turn, seed=turn)
                        (result,) = channel.call(call)
                        assert_close(result, self._expected(executor, call)[0])
                    channel.end_walk()

            clients = asyncio.gather(*[asyncio.to_thread(client, number) for number in range(3)])
            while not clients.done():
                await self._check(executor, other, self._call(executor, (2,), Pass.FORWARD, 2))
                await asyncio.sleep(0.001)
            await clients

    async def test_look(self, tmp_path: Path) -> None:
        """A peer that does not join gets the executor's status and is no client."""
        if not self.blocking:
            pytest.skip("it has no blocking clients")
        async with self._executor(tmp_path) as (executor, address):
            transport = make_transport(address, **self.connect_options(tmp_path))
            look = await asyncio.wait_for(asyncio.to_thread(transport.look, address), WITHIN_S)
            assert look.status["clients"] == []
            assert look.status["layers"] == len(executor.layers)
            assert look.model["architecture"] == "LlamaForCausalLM"

    @staticmethod
    def _call_like(channel: Channel) -> Call:
        spec = channel.layers[0]
        return Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.zeros(1, spec.in_features, dtype=spec.dtype),))


class _Heard:
    """A session whose calls are noted: the name of the method, and what it was given."""

    def __init__(self, session: Session, heard: list[tuple[Any, ...]]) -> None:
        self._session, self._heard = session, heard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        if name not in ("at_once", "submit", "begin_walk", "end_walk"):
            return found

        def noted(*given: Any) -> Any:
            self._heard.append((name, *given))
            return found(*given)

        return noted


def _hear(executor: Executor) -> list[tuple[Any, ...]]:
    """Return the list in which calls of the executor's sessions are noted from now on."""
    heard: list[tuple[Any, ...]] = []
    executor.service.taps.append(lambda session: cast(Session, _Heard(session, heard)))
    return heard


class _Hold(Policy):
    """Runs nothing as long as ``holds``, and notes which layers it runs."""

    name = "hold"

    def __init__(self) -> None:
        self.holds, self.layers = True, list[tuple[int, ...]]()

    def decide(self, view: View, now: float) -> Decision:
        if self.holds:
            return Wait(now + 0.01)
        key = view.oldest.key
        self.layers.append(key.layers)
        return Run(key, view.queues[key].take(view.max_rows), "no longer held")


_VICTIM = """
import json, sys, time
from symbiosis.core.registry import make_transport
channel = make_transport(sys.argv[1], **json.loads(sys.argv[2])).connect_blocking(sys.argv[1], "victim")
channel.begin_walk()
print("there", flush=True)
time.sleep(600)
"""


def _full_name(executor: Executor, channel: Channel) -> str:
    """Return the executor's name of a client, which begins with the tenant if each tenant has names of its own."""
    return next(str(name) for name in executor.status()["clients"] if name.rpartition("/")[2] == channel.client)


def _siblings(layers: Any) -> tuple[int, ...]:
    """Return two layers that can read the same rows."""
    first: LayerSpec = layers[0]
    second = next(spec for spec in layers[1:] if (spec.in_features, spec.dtype) == (first.in_features, first.dtype))
    return first.layer, second.layer
