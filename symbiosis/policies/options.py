"""Checks of the options that policies take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from symbiosis.core.terms import tenant_of
from symbiosis.errors import UsageError

T = TypeVar("T")


def number(policy: str, option: str, value: object, *, unit: str = "", zero: bool = False) -> float:
    """Return a finite number greater than 0, or 0 as well if ``zero`` is set.

    Args:
        policy, option: names for the error message.
        unit: text for the error message, such as ``" of milliseconds"``.

    Raises:
        UsageError: the value is no such number.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= sys.float_info.max
        or not (value or zero)
    ):
        bound = ", 0 or more" if zero else " greater than 0"
        raise UsageError(f"{policy}: {option} is {value!r}; it must be a number{unit}{bound}")
    return float(value)


def milliseconds(policy: str, option: str, value: object, *, zero: bool = False) -> float:
    """Return a finite number of milliseconds greater than 0, or 0 as well if ``zero`` is set.

    Raises:
        UsageError: the value is no such number.
    """
    return number(policy, option, value, unit=" of milliseconds", zero=zero)


def whole(policy: str, option: str, value: object, *, least: int | None = None) -> int:
    """Return a whole number, which is at least ``least``.

    Raises:
        UsageError: the value is no such number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f", {least} or more"
        raise UsageError(f"{policy}: {option} is {value!r}; it must be a whole number{bound}")
    return value


def mapping(policy: str, option: str, value: Mapping[str, T] | None, *, tenants: bool = True) -> Mapping[str, T]:
    """Return a mapping by the names of tenants, or of clients; an empty one for None.

    Raises:
        UsageError: the value is no mapping, or one of its keys cannot be the name of a tenant or client.
    """
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{policy}: {option} is {value!r}; give one entry for each name, as in {option}.alice=…")
    for name in value or {}:
        if not isinstance(name, str) or not name:
            raise UsageError(f"{policy}: {option} has {name!r}, which is not a name")
        if tenants and "/" in name:
            tenant = tenant_of(name)
            raise UsageError(f"{policy}: {option} has {name!r}, which is a client; give its tenant, {tenant!r}")
    return value or {}


def targets(policy: str, clients: Mapping[str, tuple[float, float]] | None) -> dict[str, tuple[float, float]]:
    """Return (slo_ms, ttft_ms) by client.

    Raises:
        UsageError: a client has no such pair.
    """
    found = {}
    for name, pair in mapping(policy, "clients", clients, tenants=False).items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise UsageError(
                f"{policy}: clients has {pair!r} for {name!r}; give (slo_ms, ttft_ms), on a command line "
                f"clients.{name}=50/900"
            )
        slo_ms, ttft_ms = pair
        found[name] = (
            milliseconds(policy, f"slo_ms of {name!r}", slo_ms),
            milliseconds(policy, f"ttft_ms of {name!r}", ttft_ms),
        )
    return found
