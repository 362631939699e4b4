"""The wire format: messages between a client and an executor, the same for every transport. No I/O here.

A message is a msgpack array whose first element is its :class:`Type`; ``docs/wire.md`` describes each. Nothing that
arrives is trusted: :func:`unpack` bounds its size and depth before it is parsed and every field is checked before it
is used. Tensors do not travel in messages; a message only says where they are. Shapes and dtypes do not travel either:
they follow from the layer table, so they cannot contradict it.

Legend: a *place* is an offset into a client's arena, in bytes, a multiple of :data:`ALIGN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple, cast

import msgpack

from symbiosis import errors
from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.errors import BrokenError, SymbiosisError, UsageError, WireError

__all__ = [
    "ALIGN",
    "VERSION",
    "CallMessage",
    "Hello",
    "Limits",
    "Type",
    "align",
    "error_of",
    "pack",
    "pack_call",
    "pack_error",
    "pack_hello",
    "pack_result",
    "read_call",
    "read_hello",
    "read_id",
    "read_rendezvous",
    "unpack",
    "unpack_answer",
]

VERSION = 3
MAGIC = "symbiosis"
ALIGN = 64
"""Matrices start at multiples of this in an arena: a cache line."""
MAX_TO_EXECUTOR = 64 << 10
"""Bytes of a message to an executor."""
MAX_TO_CLIENT = 128 << 20
"""Bytes of a message to a client: the welcome brings the layer table and the tokenizer's files."""
MAX_NAME = 128
MAX_SIBLINGS = 64
MAX_RENDEZVOUS = 4096
"""Bytes of a value that a process group needs to know of the other side: 170 for gloo, 128 for NCCL."""
_INT63 = (1 << 63) - 1


class Type(IntEnum):
    """What a message is. To the executor: HELLO, CALL, CANCEL, BEGIN, END, PING, STATUS, SHARE, SEGMENT. To the
    client: the others; STATUS, SHARE and SEGMENT are answered with the same type. RENDEZVOUS goes both ways."""

    HELLO = 1
    WELCOME = 2
    CALL = 3
    RESULT = 4
    FAILED = 5
    CANCEL = 6
    BEGIN = 7
    END = 8
    PING = 9
    PONG = 10
    ENDED = 11
    STATUS = 12
    SHARE = 13
    RENDEZVOUS = 14
    SEGMENT = 15


@dataclass(frozen=True)
class Limits:
    """What one client may take of an executor, told to it in the welcome.

    ``calls``, ``rows``: outstanding at once; whoever has more is not listened to until some are answered.
    ``arena_bytes``: of the memory that carries its tensors. ``clients``: of one tenant at once, over ``tcp://``.
    """

    calls: int = 64
    rows: int = 1 << 20
    arena_bytes: int = 1 << 30
    clients: int = 64

    @classmethod
    def of(cls, value: Any) -> Limits:
        """From a welcome."""
        if not isinstance(value, dict):
            raise WireError(f"limits are {value!r}")
        return cls(**{field.name: _integer(value.get(field.name), 1, _INT63, field.name) for field in fields(cls)})

    def to_wire(self) -> dict[str, int]:
        return asdict(self)


class Hello(NamedTuple):
    """Who knocks, and what it asks to be served like. Without a name it only wants to look: the executor's state, no
    session."""

    name: str | None
    terms: Terms = NO_TERMS


class CallMessage(NamedTuple):
    """A call, its tensors at ``place``, its results expected at ``answer``."""

    id: int
    key: Key
    kind: Kind
    rows: int
    place: int
    answer: int


def align(size: int) -> int:
    """The next multiple of :data:`ALIGN`."""
    return -(-size // ALIGN) * ALIGN


# ----------------------------------------------------------------------------------------------------------- messages


_packer = msgpack.Packer(autoreset=True)
_TYPES = {int(type_): type_ for type_ in Type}


def pack(type_: Type, *content: Any) -> bytes:
    """A message."""
    return cast(bytes, msgpack.packb((int(type_), *content)))


def pack_hello(hello: Hello) -> bytes:
    """HELLO. Of the terms, those that are given."""
    terms = {name: value for name in _ASKED if (value := getattr(hello.terms, name)) != getattr(NO_TERMS, name)}
    return pack(Type.HELLO, MAGIC, VERSION, hello.name, terms)


def pack_call(call: CallMessage) -> bytes:
    """CALL."""
    layers, pass_ = call.key
    return cast(
        bytes,
        _packer.pack((3, call.id, layers, int(pass_), int(call.kind), call.rows, call.place, call.answer)),
    )


def pack_result(id_: int) -> bytes:
    """RESULT."""
    return cast(bytes, _packer.pack((4, id_)))


def pack_error(id_: int, error: BaseException) -> bytes:
    """FAILED: what went wrong with one call, by the name of its error class."""
    name = type(error).__name__
    return pack(Type.FAILED, id_, name if name in errors.__all__ else "BrokenError", str(error)[:2000])


def error_of(name: Any = None, text: Any = "it gave no reason") -> SymbiosisError:
    """The error that a FAILED or ENDED message tells of, as far as it does."""
    cls = getattr(errors, name, BrokenError) if isinstance(name, str) and name in errors.__all__ else BrokenError
    return cast(SymbiosisError, cls(str(text)[:2000]))


def unpack(data: bytes | memoryview) -> tuple[Type, Sequence[Any]]:
    """The type and content of a message to an executor; its arrays become tuples.

    Raises:
        WireError: it is too large, or no message.
    """
    return _unpack(data, MAX_TO_EXECUTOR, use_list=False)


def unpack_answer(data: bytes | memoryview) -> tuple[Type, Sequence[Any]]:
    """The type and content of a message to a client; its arrays become lists."""
    return _unpack(data, MAX_TO_CLIENT, use_list=True)


def _unpack(data: bytes | memoryview, max_bytes: int, *, use_list: bool) -> tuple[Type, Sequence[Any]]:
    if len(data) > max_bytes:
        raise WireError(f"a message of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        message = msgpack.unpackb(data, use_list=use_list, max_ext_len=0, strict_map_key=True)
        return _TYPES[message[0]], message[1:]
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data)} bytes that are no message: {type(error).__name__}: {error}"[:300]) from None


def read_hello(content: Sequence[Any]) -> Hello:
    """Check a HELLO: [magic, version, name, terms]."""
    if len(content) < 2 or content[0] != MAGIC:
        raise WireError("the first message is not this protocol's HELLO")
    if content[1] != VERSION or len(content) != 4:
        raise WireError(
            f"wire format {content[1]!r}; this executor speaks {VERSION}: install the same symbiosis on both sides"
        )
    name = content[2]
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
        raise WireError(f"a client's name must be 1 to {MAX_NAME} printable characters")
    return Hello(name, _terms(content[3]))


def _terms(value: Any) -> Terms:
    if not isinstance(value, dict) or not value.keys() <= set(_ASKED):
        raise WireError(f"terms are a map of {', '.join(_ASKED)}")
    kind = value.get("kind")
    if kind is not None and (type(kind) is not int or kind not in _KINDS):
        raise WireError(f"kind {kind!r} is unknown"[:300])
    try:
        return Terms(**{**value, "kind": None if kind is None else _KINDS[kind]}).check()
    except UsageError as error:
        raise WireError(str(error)[:300]) from None


def read_call(content: Sequence[Any]) -> CallMessage:
    """Check the fields of a CALL for themselves; whether they fit the layer table is the session's to check."""
    try:
        id_, layers, pass_, kind, rows, place, answer = content
    except ValueError:
        raise WireError(f"a CALL has 7 fields, not {len(content)}") from None
    for value in (id_, rows, place, answer):
        if type(value) is not int or not 0 <= value <= _INT63:
            raise WireError("a CALL's id, rows and places are whole numbers from 0")
    if place % ALIGN or answer % ALIGN:
        raise WireError(f"a CALL's places are multiples of {ALIGN}, not {place} and {answer}")
    if type(layers) is not tuple or not 0 < len(layers) <= MAX_SIBLINGS:
        raise WireError(f"a CALL names 1 to {MAX_SIBLINGS} layers")
    for layer in layers:
        if type(layer) is not int:
            raise WireError("a CALL names layers by their index")
    try:
        return CallMessage(id_, Key(layers, _PASSES[pass_]), _KINDS[kind], rows, place, answer)
    except (KeyError, TypeError):
        raise WireError(f"pass {pass_!r} or kind {kind!r} is unknown") from None


_PASSES = {int(pass_): pass_ for pass_ in Pass}
_KINDS = {int(kind): kind for kind in Kind}
_ASKED = Terms._fields


def read_id(content: Sequence[Any]) -> int:
    """The id of a call that a message is about, its first field."""
    return _integer(content[0] if content else None, 0, _INT63, "id")


def read_rendezvous(content: Sequence[Any]) -> tuple[int, str, bytes]:
    """Return lane, key and value of a RENDEZVOUS, after checking them."""
    if len(content) != 3:
        raise WireError(f"a RENDEZVOUS has 3 fields, not {len(content)}")
    lane, key, value = content
    if type(key) is not str or len(key) > MAX_NAME:
        raise WireError(f"a RENDEZVOUS's key has at most {MAX_NAME} characters")
    if type(value) is not bytes or len(value) > MAX_RENDEZVOUS:
        raise WireError(f"a RENDEZVOUS's value has at most {MAX_RENDEZVOUS} bytes")
    return _integer(lane, 0, 1, "lane"), key, value


def _integer(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{what} is {value!r}; it must be a whole number from {low} to {high}"[:300])
    return value


BEGIN, END, PING = (pack(type_) for type_ in (Type.BEGIN, Type.END, Type.PING))
"""Messages without content."""
