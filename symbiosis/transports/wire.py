"""The wire format: messages between a client and an executor, the same for every transport, without I/O.

A message is a msgpack array whose first element is its :class:`Type`; ``docs/wire.md`` describes each. No received data
is trusted: :func:`unpack` limits the size of a message, and the length of each array and map in it before memory is
allocated for it, and every field is checked before it is used. Tensors do not travel in messages; a message only says
where they are. Shapes and dtypes follow from the layer table and do not travel, so they cannot contradict it.

A *place* is an offset into a client's arena, in bytes, and a multiple of :data:`ALIGN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgpack

from symbiosis import errors
from symbiosis.core.requests import MAX_SIBLINGS, Key, Pass
from symbiosis.core.terms import MAX_NAME, NO_TERMS, Kind, Terms, is_name
from symbiosis.errors import BrokenError, SymbiosisError, UsageError, WireError
from symbiosis.transports.limits import Limits

VERSION = 7
MAGIC = "symbiosis"
ALIGN = 64
"""Alignment of matrices in an arena, in bytes: a cache line."""
MAX_TO_EXECUTOR = 64 << 10
"""Largest message to an executor, in bytes."""
MAX_TO_CLIENT = 128 << 20
"""Largest message to a client before it has joined, in bytes: WELCOME contains layer table and tokenizer files."""
MAX_TO_JOINED = MAX_TO_EXECUTOR
"""Largest message to a client that has joined, in bytes. A FAILED or ENDED may need 8 KiB, others less."""
MAX_LENGTH = MAX_SIBLINGS
"""Largest length of an array or a map in a message to an executor, or to a client that has joined: a CALL may name as
many layers. Memory for an array is allocated before its elements have come, for up to 1,024 arrays inside one another.
"""
MAX_LENGTH_TO_CLIENT = 1 << 15
"""Largest length of an array or a map in a message to a client that has not joined: of the layer table."""
MAX_VALUES = 1 << 20
"""Most values of all arrays and maps in a message to a client that has not joined. Each takes some 100 bytes of memory,
and may be one byte of the message."""
MAX_RENDEZVOUS = 4096
"""Largest value of a RENDEZVOUS, in bytes. gloo needs 170, NCCL 128."""
_INT63 = (1 << 63) - 1


class Type(IntEnum):
    """Type of a message. Executors answer STATUS, SHARE, SEGMENT and RENDEZVOUS with the same type."""

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


class Hello(NamedTuple):
    """A client's first message: its name and the terms it asks for. Without a name it asks for the executor's status
    only, and gets no session."""

    name: str | None
    terms: Terms = NO_TERMS


class CallMessage(NamedTuple):
    """A call. Its matrices lie at ``place``; the client expects its results at ``answer``."""

    id: int
    key: Key
    kind: Kind
    rows: int
    place: int
    answer: int


def align(size: int) -> int:
    """Return ``size`` rounded up to a multiple of :data:`ALIGN`."""
    return -(-size // ALIGN) * ALIGN


_packer = msgpack.Packer(autoreset=True)
_TYPES = {int(type_): type_ for type_ in Type}
_CALL, _RESULT = int(Type.CALL), int(Type.RESULT)


def pack(type_: Type, *content: Any) -> bytes:
    """Return a message."""
    return cast(bytes, msgpack.packb((int(type_), *content)))


def pack_hello(hello: Hello) -> bytes:
    """Return HELLO, with the terms that differ from the defaults."""
    terms = {name: value for name in _ASKED if (value := getattr(hello.terms, name)) != getattr(NO_TERMS, name)}
    return pack(Type.HELLO, MAGIC, VERSION, hello.name, terms)


def pack_call(call: CallMessage) -> bytes:
    """Return CALL."""
    layers, pass_, fp32, choices = call.key
    message = (_CALL, call.id, layers, int(pass_), fp32, choices, int(call.kind), call.rows, call.place, call.answer)
    return cast(bytes, _packer.pack(message))


def pack_result(id_: int) -> bytes:
    """Return RESULT."""
    return cast(bytes, _packer.pack((_RESULT, id_)))


def pack_error(id_: int, error: BaseException) -> bytes:
    """Return FAILED, with the name of the error's class if :mod:`symbiosis.errors` has it."""
    name = type(error).__name__
    return pack(Type.FAILED, id_, name if name in errors.__all__ else "BrokenError", str(error)[:2000])


def error_of(name: Any = None, text: Any = "it gave no reason") -> SymbiosisError:
    """Return the error in a FAILED or ENDED message. An unknown class becomes BrokenError."""
    cls = getattr(errors, name, BrokenError) if isinstance(name, str) and name in errors.__all__ else BrokenError
    return cast(SymbiosisError, cls(str(text)[:2000]))


def unpack(data: bytes | memoryview) -> tuple[Type, Sequence[Any]]:
    """Return the type and content of a message to an executor. Its arrays become tuples. Raises WireError if the
    message is too large or malformed."""
    return _unpack(data, MAX_TO_EXECUTOR, MAX_LENGTH, False)


def unpack_answer(data: bytes | memoryview, joined: bool = False) -> tuple[Type, Sequence[Any]]:
    """Return the type and content of a message to a client. Its arrays become lists. Raises like :func:`unpack`.
    ``joined`` says that the client has joined, and that no large message is due."""
    if joined:
        return _unpack(data, MAX_TO_JOINED, MAX_LENGTH, True)
    return _unpack(data, MAX_TO_CLIENT, MAX_LENGTH_TO_CLIENT, True, _Count())


def _unpack(
    data: bytes | memoryview, max_bytes: int, max_length: int, use_list: bool, count: _Count | None = None
) -> tuple[Type, Sequence[Any]]:
    if len(data) > max_bytes:
        raise WireError(f"a message of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        message = msgpack.unpackb(
            data,
            use_list=use_list,
            list_hook=count,
            object_hook=count,
            max_array_len=max_length,
            max_map_len=max_length,
            max_ext_len=0,
            strict_map_key=True,
        )
        return _TYPES[message[0]], message[1:]
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data)} bytes that are no message: {type(error).__name__}: {error}"[:300]) from None


class _Count:
    """Counts the values in arrays and maps while a message is parsed. Raises ValueError beyond MAX_VALUES."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def __call__(self, found: Any) -> Any:
        self._left -= 1 + len(found)
        if self._left < 0:
            raise ValueError(f"more than {MAX_VALUES} values")
        return found


def read_hello(content: Sequence[Any]) -> Hello:
    """Return the content of a HELLO, [magic, version, name, terms], after checking it."""
    if len(content) < 2 or content[0] != MAGIC:
        raise WireError("the first message is not this protocol's HELLO")
    if content[1] != VERSION or len(content) != 4:
        raise WireError(
            f"wire format {content[1]!r:.50}; this executor speaks {VERSION}: install the same symbiosis on both sides"
        )
    name = content[2]
    if name is not None and not is_name(name):
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
    """Return the content of a CALL after checking each field. The session checks whether it fits the layer table."""
    if len(content) != 9:
        raise WireError(f"a CALL has 9 fields, not {len(content)}")
    try:
        return CallMessage(read_id(content), *_read_call(*content[1:]))
    except TypeError:
        raise WireError("a CALL has a field that is no number or array of numbers") from None


@lru_cache(1 << 12)  # most calls repeat an earlier one in all but the id
def _read_call(
    layers: Any, pass_: Any, fp32: Any, choices: Any, kind: Any, rows: Any, place: Any, answer: Any
) -> tuple[Key, Kind, int, int, int]:
    for value in (choices, rows, place, answer):
        _integer(value, 0, _INT63, "a CALL's number of choices or rows, or a place,")
    if place % ALIGN or answer % ALIGN:
        raise WireError(f"a CALL's places are multiples of {ALIGN}, not {place} and {answer}")
    if type(layers) is not tuple or not 0 < len(layers) <= MAX_SIBLINGS:
        raise WireError(f"a CALL names 1 to {MAX_SIBLINGS} layers")
    for layer in layers:
        if type(layer) is not int:
            raise WireError("a CALL names layers by their index")
    if type(fp32) is not bool:
        raise WireError("a CALL says by true or false whether its matrices are fp32")
    try:
        return Key(layers, _PASSES[pass_], fp32, choices), _KINDS[kind], rows, place, answer
    except KeyError:
        raise WireError(f"pass {pass_!r} or kind {kind!r} is unknown"[:300]) from None


_PASSES = {int(pass_): pass_ for pass_ in Pass}
_KINDS = {int(kind): kind for kind in Kind}
_ASKED = Terms._fields


def read_id(content: Sequence[Any]) -> int:
    """Return the id of the call that a message is about: its first field."""
    return _integer(content[0] if content else None, 0, _INT63, "id")


def read_limits(value: Any) -> Limits:
    """Return the limits in a WELCOME, after checking them."""
    if not isinstance(value, dict):
        raise WireError(f"limits are {value!r}"[:300])
    return Limits(**{field.name: _integer(value.get(field.name), 1, _INT63, field.name) for field in fields(Limits)})


def read_rendezvous(content: Sequence[Any]) -> tuple[int, str, bytes]:
    """Return lane, key and value of a RENDEZVOUS, after checking them."""
    if len(content) != 3:
        raise WireError(f"a RENDEZVOUS has 3 fields, not {len(content)}")
    lane, key, value = content
    if type(key) is not str or len(key) > MAX_NAME:
        raise WireError(f"a RENDEZVOUS's key has at most {MAX_NAME} characters")
    if type(value) is not bytes or not 0 < len(value) <= MAX_RENDEZVOUS:
        raise WireError(f"a RENDEZVOUS's value has 1 to {MAX_RENDEZVOUS} bytes")
    return _integer(lane, 0, 1, "lane"), key, value


def _integer(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{what} is {value!r}; it must be a whole number from {low} to {high}"[:300])
    return value


BEGIN, END, PING = (pack(type_) for type_ in (Type.BEGIN, Type.END, Type.PING))
"""Messages without content."""
