"""The kit for transports finds transports that leave out a part of what a client says."""

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

_names = itertools.count(1)


class Kit(transport.TransportConformance):
    __test__ = False

    def address(self, folder: Path) -> str:
        return f"inproc://kit-{next(_names)}"

    def connect_options(self, folder: Path) -> dict[str, Any]:
        return {}


def changed(change: Callable[[Call], Call]) -> Callable[[Any], None]:
    def apply(channel: Any) -> None:
        send = channel.send
        channel.send = lambda call: send(change(call))

    return apply


def without(*methods: str) -> Callable[[Any], None]:
    def apply(channel: Any) -> None:
        for method in methods:
            setattr(channel, method, lambda *_: None)

    return apply


def ignoring_strides(call: Call) -> Call:
    return replace(call, tensors=tuple(torch.as_strided(t, t.shape, (t.shape[1], 1)).clone() for t in call.tensors))


class Reply:
    """A reply that is awaited like a future, and is none."""

    def __init__(self, future: asyncio.Future[Results]) -> None:
        self.done, self.result, self._future = future.done, future.result, future

    def __await__(self) -> Generator[Any, None, Results]:
        return self._future.__await__()


FAULTY: dict[str, tuple[Callable[[Any], None], str, tuple[Any, ...]]] = {
    "no kinds": (changed(lambda call: replace(call, kind=Kind.DECODE)), "test_what_the_executor_hears", ()),
    "no walks": (without("begin_walk", "end_walk"), "test_what_the_executor_hears", ()),
    "no cancellation": (without("cancel"), "test_a_cancelled_call_does_not_run", ()),
    "one tensor of a bank": (
        changed(lambda call: replace(call, tensors=call.tensors[:1])),
        "test_calls_of_several_tensors",
        ("linear",),
    ),
    "one tensor of an MLP": (
        changed(lambda call: replace(call, tensors=call.tensors[:1])),
        "test_calls_of_several_tensors",
        ("mlp",),
    ),
    "no strides": (changed(ignoring_strides), "test_rows_in_any_layout", ()),
    "no terms": (lambda channel: None, "test_what_the_executor_hears", ()),
}


@pytest.mark.parametrize("fault", FAULTY)
async def test_a_faulty_transport_fails(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter, test, arguments = FAULTY[fault]

    class Faulty(InProcTransport):
        async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Any:
            channel = await super().connect(address, client, NO_TERMS if fault == "no terms" else terms)
            alter(channel)
            return channel

    await getattr(Kit(), test)(tmp_path, *arguments)
    monkeypatch.setattr(transport, "WITHIN_S", 1.0)
    monkeypatch.setattr(transport, "make_transport", lambda *_, **__: Faulty())
    with pytest.raises((AssertionError, TimeoutError, RequestError)):  # not an error of the faulty transport itself
        await getattr(Kit(), test)(tmp_path, *arguments)


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
