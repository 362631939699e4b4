"""The kit for transports finds transports that leave out a part of what a client says, and no others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis.core.requests import Call, Results
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.errors import RequestError
from symbiosis.testing import transport
from symbiosis.transports.inproc import InProcTransport
from symbiosis.transports.shm import ShmTransport

_names = itertools.count(1)


class Kit(transport.TransportConformance):
    __test__ = False

    def address(self, folder: Path) -> str:
        return f"inproc://kit-{next(_names)}"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {}


class ShmKit(Kit):
    def address(self, folder: Path) -> str:
        return f"shm://{folder}/{next(_names)}.sock"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {"retry": 0.0}


def changed(change: Callable[[Call], Call]) -> Callable[[Any], None]:
    def apply(channel: Any) -> None:
        send, call = channel.send, channel.call
        channel.send = lambda sent: send(change(sent))
        channel.call = lambda sent: call(change(sent))

    return apply


def without(*methods: str) -> Callable[[Any], None]:
    def apply(channel: Any) -> None:
        for method in methods:
            setattr(channel, method, lambda *_: None)

    return apply


def ignoring_strides(call: Call) -> Call:
    return replace(call, tensors=tuple(torch.as_strided(t, t.shape, (t.shape[1], 1)).clone() for t in call.tensors))


decoding = changed(lambda call: replace(call, kind=Kind.DECODE))
of_one_tensor = changed(lambda call: replace(call, tensors=call.tensors[:1]))


class Reply:
    """A reply that is awaited like a future, and is none."""

    def __init__(self, future: asyncio.Future[Results]) -> None:
        self.done, self.result, self._future = future.done, future.result, future

    def __await__(self) -> Generator[Any, None, Results]:
        return self._future.__await__()


def in_process(change: Callable[[Any], None], test: str, *arguments: Any) -> tuple[Any, ...]:
    return Kit, InProcTransport, change, test, arguments


def in_others(change: Callable[[Any], None], test: str, *arguments: Any) -> tuple[Any, ...]:
    return ShmKit, ShmTransport, change, test, arguments


FAULTY: dict[str, tuple[Any, ...]] = {
    "no kinds": in_process(decoding, "test_what_the_executor_hears", False),
    "no walks": in_process(without("begin_walk", "end_walk"), "test_what_the_executor_hears", False),
    "no cancellation": in_process(without("cancel"), "test_a_cancelled_call_does_not_run"),
    "no interruption": in_process(without("interrupt"), "test_an_interrupted_call_does_not_run"),
    "one tensor of a bank": in_process(of_one_tensor, "test_calls_of_several_tensors", "linear"),
    "one tensor of an MLP": in_process(of_one_tensor, "test_calls_of_several_tensors", "mlp"),
    "no strides": in_process(changed(ignoring_strides), "test_rows_in_any_layout"),
    "no terms": in_process(lambda channel: None, "test_what_the_executor_hears", False),
    "no checks": in_others(without("before_return"), "test_an_executor_that_may_not_come_back", True, False),
    "no kinds of synchronous clients": in_others(decoding, "test_what_the_executor_hears", True),
    "no walks of synchronous clients": in_others(
        without("begin_walk", "end_walk"), "test_what_the_executor_hears", True
    ),
    "no terms of synchronous clients": in_others(lambda channel: None, "test_what_the_executor_hears", True),
    "no checks of synchronous clients": in_others(
        without("before_return"), "test_an_executor_that_may_not_come_back", True, True
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_a_faulty_transport_fails(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, base, alter, test, arguments = FAULTY[fault]

    class Faulty(base):  # type: ignore[misc]
        async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Any:
            return altered(await super().connect(address, client, NO_TERMS if "no terms" in fault else terms))

        def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Any:
            return altered(super().connect_blocking(address, client, NO_TERMS if "no terms" in fault else terms))

    def altered(channel: Any) -> Any:
        alter(channel)
        return channel

    await getattr(kit(), test)(tmp_path, *arguments)
    monkeypatch.setattr(transport, "WITHIN_S", 1.0)
    monkeypatch.setattr(transport, "make_transport", lambda *_, **options: Faulty(**options))
    with pytest.raises((AssertionError, TimeoutError, RequestError, pytest.fail.Exception)):  # not one of Faulty itself
        await getattr(kit(), test)(tmp_path, *arguments)


@pytest.mark.parametrize("test", ["test_a_cancelled_call_does_not_run", "test_a_client_that_leaves_is_forgotten"])
async def test_replies_need_not_be_futures(test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(InProcTransport):
        async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Any:
            channel: Any = await super().connect(address, client, terms)
            send = channel.send
            channel.send = lambda call: Reply(send(call))
            return channel

    monkeypatch.setattr(transport, "make_transport", lambda *_, **__: Other())
    await getattr(Kit(), test)(tmp_path)
