"""Tests of the wire format: messages that are written can be read, and all other bytes are refused without harm."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis import errors
from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import BrokenError, LayerError, WireError
from symbiosis.transports import wire
from symbiosis.transports.wire import CallMessage, Hello, Type

sixty_three = st.integers(0, (1 << 63) - 1)
places = st.integers(0, 1 << 50).map(lambda place: place * wire.ALIGN)
calls = st.builds(
    CallMessage,
    id=sixty_three,
    key=st.builds(
        Key,
        st.lists(st.integers(0, 5000), min_size=1, max_size=8).map(tuple),
        st.sampled_from(Pass),
        choices=sixty_three,
    ),
    kind=st.sampled_from(Kind),
    rows=sixty_three,
    place=places,
    answer=places,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@given(calls)
def test_calls_are_read_as_written(call: CallMessage) -> None:
    type_, content = wire.unpack(wire.pack_call(call))
    assert type_ is Type.CALL
    assert wire.read_call(content) == call


@given(
    st.builds(
        Hello,
        st.none() | st.text("abc/-é", min_size=1, max_size=9),
        st.builds(
            Terms,
            st.integers(-1000, 1000),
            st.none() | st.floats(1e-3, 1e9),
            st.none() | st.floats(1e-3, 1e9),
            st.none() | st.sampled_from(Kind),
        ),
    )
)
def test_hellos_are_read_as_written(hello: Hello) -> None:
    type_, content = wire.unpack(wire.pack_hello(hello))
    assert type_ is Type.HELLO
    assert wire.read_hello(content) == hello


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (None, "terms are a map"),
        ([], "terms are a map"),
        ({"asked": False}, "terms are a map of priority"),
        ({"color": "red"}, "terms are a map of priority"),
        ({"priority": 10**9}, "priority is"),
        ({"priority": True}, "priority is"),
        ({"slo_ms": -1.0}, "slo_ms is"),
        ({"slo_ms": float("nan")}, "slo_ms is"),
        ({"ttft_ms": "soon"}, "ttft_ms is"),
        ({"kind": 7}, "kind 7"),
        ({"kind": [1]}, "kind"),
    ],
)
def test_invalid_terms(terms: Any, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.read_hello([wire.MAGIC, wire.VERSION, "a", terms])


def test_of_another_version_little_is_told() -> None:
    """What a peer sends as its version is in the executor's log."""
    with pytest.raises(WireError, match=f"this executor speaks {wire.VERSION}") as caught:
        wire.read_hello((wire.MAGIC, "\0" * 60_000, None, {}))
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        type_, content = wire.unpack(data)
    except WireError:
        return
    assert isinstance(type_, Type)
    for read in (wire.read_call, wire.read_hello, wire.read_id):
        with contextlib.suppress(WireError):
            read(content)


@given(st.one_of(st.none(), st.text(max_size=3)), plain)
def test_any_terms_are_terms_or_refused(name: str | None, terms: Any) -> None:
    try:
        hello = wire.read_hello([wire.MAGIC, wire.VERSION, name, terms])
    except WireError:
        return
    assert hello.name is None or isinstance(hello.name, str)
    assert hello.terms.check() is hello.terms


@given(st.lists(plain, max_size=9))
def test_any_content_is_a_call_or_refused(content: list[Any]) -> None:
    try:
        call = wire.read_call(tuple(content))
    except WireError:
        return
    assert all(type(value) is int and value >= 0 for value in (call.id, call.rows, call.place, call.answer))
    assert call.place % wire.ALIGN == call.answer % wire.ALIGN == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb(7),
        msgpack.packb([]),
        msgpack.packb([99]),
        msgpack.packb(["x"]),
        msgpack.packb([[1]]),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        b"\x91" * 60_000,  # nested deeper than any parser supports
        b"\xdd\xff\xff\xff\xff",  # an array said to have 4 billion elements
        b"\xc6\xff\xff\xff\xff",  # claims to be 4 GB of bytes
        msgpack.packb([1, b"x" * (64 << 10)]),
    ],
    ids=range(11),
)
def test_invalid_messages(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(data)


@pytest.mark.parametrize("unpack", [wire.unpack, partial(wire.unpack_answer, joined=True)], ids=["executor", "client"])
@pytest.mark.parametrize(
    "data",
    [
        (b"\xdd\x00\x00\xff\xff" * 1024).ljust(64 << 10, b"\0"),
        msgpack.packb([1, {7: b"x" * 60_000}]),
    ],
    ids=["arrays in arrays", "a key that is a number"],
)
def test_a_message_that_is_refused_takes_little_memory(unpack: Callable[[bytes], Any], data: bytes) -> None:
    """msgpack allocates an array when it has read its length. Before 1.2.3 it kept a value whose key it refuses."""
    tracemalloc.start()
    try:
        for _ in range(20):
            with pytest.raises(WireError):
                unpack(data)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 256 << 10
    assert peak < 4 << 20


def test_values_of_a_large_message_are_counted() -> None:
    array = b"\xdc\x7f\xff" + 32_767 * b"\x90"
    assert wire.unpack_answer(b"\x92\x02" + array)[1] == [32_767 * [[]]]
    with pytest.raises(WireError, match="more than 1048576 values"):
        wire.unpack_answer(b"\x92\x02\xdc\x00\x28" + 40 * array)
    with pytest.raises(WireError, match="exceeds max_array_len"):
        wire.unpack_answer(b"\x92\x02\xdc\x80\x01" + 32_769 * b"\x90")


@pytest.mark.parametrize("name", [*errors.__all__, "OSError", "__class__", None, 7])
def test_an_error_is_read_as_its_own_class(name: Any) -> None:
    error = wire.error_of(name, "why")
    assert type(error) is (getattr(errors, name) if name in errors.__all__ else BrokenError)
    assert str(error) == "why"


def test_a_failure_states_its_class() -> None:
    _, content = wire.unpack_answer(wire.pack_error(4, LayerError("x failed")))
    assert content == [4, "LayerError", "x failed"]
    _, content = wire.unpack_answer(wire.pack_error(4, ZeroDivisionError("y")))
    assert content == [4, "BrokenError", "y"]


def test_a_failure_without_a_reason_is_still_a_failure() -> None:
    for content in ([], ["LayerError"], [7, 8]):
        assert isinstance(wire.error_of(*content[:2]), errors.SymbiosisError)
