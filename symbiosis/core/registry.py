"""Find policies, transports and privacy schemes by name: the built-in ones, then those of installed packages.

A package adds a name with an entry point in the group ``symbiosis.policies``, ``symbiosis.transports`` or
``symbiosis.privacy``::

    [project.entry-points."symbiosis.policies"]
    shortest-first = "my_package:ShortestFirst"
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from symbiosis.core.policy import Policy
from symbiosis.core.privacy import Privacy
from symbiosis.core.transport import Transport
from symbiosis.errors import UnknownNameError, UsageError

POLICIES = "symbiosis.policies"
TRANSPORTS = "symbiosis.transports"
PRIVACY = "symbiosis.privacy"

_BUILT_IN = {
    POLICIES: {
        "no-lockstep": "symbiosis.policies.no_lockstep:NoLockstep",
        "lockstep": "symbiosis.policies.lockstep:Lockstep",
        "opportunistic": "symbiosis.policies.opportunistic:Opportunistic",
        "co-serving": "symbiosis.policies.coserving:CoServing",
        "fair": "symbiosis.policies.fair:Fair",
        "priority": "symbiosis.policies.priority:Priority",
        "rate-limit": "symbiosis.policies.rate_limit:RateLimit",
        "temporal": "symbiosis.policies.temporal:TemporalSharing",
        "dynamic-temporal": "symbiosis.policies.temporal:DynamicTemporalSharing",
    },
    TRANSPORTS: {
        "inproc": "symbiosis.transports.inproc:InProcTransport",
        "shm": "symbiosis.transports.shm:ShmTransport",
        "tcp": "symbiosis.transports.tcp:TcpTransport",
        "dist": "symbiosis.transports.dist:DistTransport",
    },
    PRIVACY: {
        "noise-pool": "symbiosis.privacy.noise_pool:NoisePool",
        "local-pads": "symbiosis.privacy.local_pads:LocalPads",
        "secret-shares": "symbiosis.privacy.secret_shares:SecretShares",
    },
}

LISTS = ("file://", "http://", "https://")
"""Prefixes of addresses where a list of executors' addresses is: in a file, or in a server's answer to GET."""

_SEVERAL = "symbiosis.transports.replicas:Replicas"
"""The transport for several addresses of one model."""

_WHAT = {POLICIES: "policy", TRANSPORTS: "transport", PRIVACY: "privacy scheme"}


def _installed(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


def names(group: str) -> list[str]:
    """Return the names in an entry point group, the built-in ones first."""
    return [*_BUILT_IN[group], *sorted(set(_installed(group)) - set(_BUILT_IN[group]))]


def _built_in(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find(group: str, name: str) -> tuple[Any, str]:
    """Return what has a name, and from where another package has it, such as ``my_package:ShortestFirst``; empty text
    if it is built in.

    Raises:
        UnknownNameError: nothing has this name, or it cannot be loaded.
    """
    what = _WHAT[group]
    if name in _BUILT_IN[group]:
        return _built_in(_BUILT_IN[group][name]), ""
    entry = _installed(group).get(name)
    if entry is None:
        raise UnknownNameError(
            f"unknown {what} {name!r}; known are {', '.join(names(group))} "
            f"(a package can add one with the entry point group {group!r})"
        )
    try:
        return entry.load(), entry.value
    except Exception as error:
        raise UnknownNameError(f"{what} {name!r} is installed, but {entry.value} cannot be loaded: {error}") from error


def _load(group: str, name: str) -> Any:
    return find(group, name)[0]


def make_policy(spec: str | Policy) -> Policy:
    """Return a policy for ``"name"`` or ``"name:option=value,option=value"``; a policy object is returned as it is.

    ``option.key=value`` sets an entry of an option that is a mapping. An entry of several numbers is written with
    slashes: ``"co-serving:clients.alice=50/900"``. ``"outer+inner"`` gives the inner policy to the outer one, which
    must have an option ``policy``: ``"fair:weights.alice=2+co-serving:slo_ms=50"``.

    Raises:
        UnknownNameError: no policy has this name.
        UsageError: the policy has no such option, or does not accept its value.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type):
            raise UsageError(f"policy is {spec!r}; give an object: {spec.__name__}()")
        return _checked_policy(spec)
    spec, *inner = re.split(r"\+(?=[A-Za-z])", spec, maxsplit=1)  # and not in 1e+3
    name = spec.partition(":")[0]
    cls = _load(POLICIES, name)
    options: dict[str, Any] = {}
    if inner:
        if "policy" not in inspect.signature(cls).parameters:
            raise UsageError(
                f"policy {name!r} cannot be around another policy; write one that can before the plus: fair+{name}"
            )
        options["policy"] = make_policy(inner[0])
    return _checked_policy(from_spec(_WHAT[POLICIES], spec, cls, options, hidden="policy"))


def _checked_policy(made: object) -> Policy:
    if not isinstance(made, Policy):
        raise UsageError(
            f"policy is {made!r}; give a name such as 'opportunistic', or an instance of a subclass of "
            "symbiosis.policies.Policy"
        )
    return made


def make_privacy(spec: str | Privacy | None) -> Privacy | None:
    """Return a privacy scheme for ``"name"`` or ``"name:option=value,option=value"``; an object is returned as it is.

    ``"none"`` and None give None: rows are sent as they are.

    Raises:
        UnknownNameError: no scheme has this name.
        UsageError: the scheme has no such option, or does not accept its value.
    """
    if spec is None or spec == "none":
        return None
    if not isinstance(spec, str):
        if isinstance(spec, type):
            raise UsageError(f"privacy is {spec!r}; give an object: {spec.__name__}(…)")
        made: object = spec
    else:
        made = from_spec(_WHAT[PRIVACY], spec, _load(PRIVACY, spec.partition(":")[0]), {})
    if not isinstance(made, Privacy):
        raise UsageError(
            f"privacy is {made!r}; give a name such as 'noise-pool:size=64', or an object with name and wrap"
        )
    return made


def from_spec(what: str, spec: str, cls: Callable[..., Any], options: dict[str, Any], hidden: str | None = None) -> Any:
    """Return ``cls(**options)`` with the options of ``"name:option=value,option=value"`` added.

    Args:
        what: the kind of thing, for error messages.
        hidden: an option that cannot be written in a spec.

    Raises:
        UsageError: ``cls`` has no such option, or does not accept its value.
    """
    name, _, text = spec.partition(":")
    known = inspect.signature(cls).parameters
    whole: set[str] = set()
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        option, dot, entry = option.strip().partition(".")
        option = option.replace("-", "_")
        option += "_" if keyword.iskeyword(option) else ""
        if option == hidden and option in known:
            raise UsageError(
                f"{what} {name!r} has no option {part!r}; write the inner {what} after a plus: {name}+lockstep"
            )
        if option not in known or (dot and not entry):
            takes = ", ".join(each.removesuffix("_") for each in known if each != hidden)
            raise UsageError(f"{what} {name!r} has no option {part!r}; it takes {takes or 'no options'}")
        if not equals:
            raise UsageError(f"{what} {name!r} is given {part!r} without a value; write {part.strip()}=VALUE")
        if option in whole or (option in options and (not dot or entry in options[option])):
            raise UsageError(
                f"{what} {name!r} is given {part!r} and another value for the same option; remove one of them"
            )
        value = value.strip()
        if dot:
            several = tuple(map(_number, value.split("/")))
            numbers = len(several) > 1 and all(isinstance(each, int | float) for each in several)
            options.setdefault(option, {})[entry] = several if numbers else _number(value)
        else:
            whole.add(option)
            options[option] = _number(value)
    try:
        return cls(**options)
    except TypeError as error:
        raise UsageError(f"{what} {spec!r}: {error}") from error


def _number(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def is_several(address: str) -> bool:
    """Return whether an address stands for several executors: a list, or where a list is kept (:data:`LISTS`)."""
    return len(addresses_in(address)) > 1 or address.startswith(LISTS)


def addresses_in(address: str) -> list[str]:
    """Return the addresses in a list such as ``shm:///run/a.sock,tcp://b:7000``."""
    return re.split(r",\s*(?=\w+://)", address)


def make_transport(address: str, **options: Any) -> Transport:
    """Return the transport for an address such as ``inproc://name``, or for several addresses of one model, separated
    by commas, in a file (``file:///path``) or from a server (``http://…``). Options that are None are left out.

    Raises:
        UnknownNameError: no transport has this scheme.
        UsageError: the address has no scheme, or the transport has no such option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - transport_options(address)
    if unknown:
        raise UsageError(f"{address.partition('://')[0]}:// has no option {', '.join(sorted(unknown))}")
    if is_several(address):
        return cast(Transport, _built_in(_SEVERAL)(address, **given))
    return cast(Transport, _load(TRANSPORTS, address.partition("://")[0])(**given))


def transport_options(address: str) -> set[str]:
    """Return the names of the options that the transport for an address has; of several addresses, those that any of
    the transports has. Raises like :func:`make_transport`."""
    known: set[str] = set()
    for each in ("shm://", "tcp://") if address.startswith(LISTS) else addresses_in(address):
        scheme, separator, _ = each.partition("://")
        if not separator:
            schemes = ", ".join(names(TRANSPORTS))
            raise UsageError(f"{each!r} is not an address; write scheme://…, where scheme is one of {schemes}")
        known |= set(inspect.signature(_load(TRANSPORTS, scheme)).parameters)
    return known
