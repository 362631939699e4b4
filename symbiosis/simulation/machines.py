"""Machines, links between them, and executors on them: what ``symbiosis plan`` and ``simulate --placement`` read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from symbiosis.errors import UsageError
from symbiosis.simulation.costs import GPUS, Gpu

GIB = 1 << 30


@dataclass(frozen=True)
class LinkFigures:
    """A link, the same in both directions."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        """Return the time from the first byte that leaves to the arrival of the last one."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Machine:
    """A machine with one or more equal devices."""

    name: str
    device: Gpu
    devices: int
    memory_bytes: int
    """Memory of each device."""
    between: LinkFigures
    """The link between two of its devices."""


@dataclass(frozen=True)
class Site:
    """An executor: where it is and what it serves."""

    machine: str
    blocks: range
    """Its blocks; the last ones include the language model head."""
    shards: int = 1
    """Number of devices over which its weights are divided."""


@dataclass(frozen=True)
class Placement:
    """Executors of one model. Clients are dealt in turn to the replicas of each part."""

    parts: Sequence[Sequence[Site]]
    """For each part of the model, in order, its replicas."""
    clients: str | None = None
    """The machine on which clients compute; None for the machine of the first part that they use."""

    @property
    def home(self) -> str:
        """The machine on which the clients of the first replica compute."""
        return self.clients or self.parts[0][0].machine

    def sites(self) -> list[Site]:
        """Return all executors."""
        return [site for part in self.parts for site in part]

    def text(self) -> str:
        """Return the placement as text for people."""
        count, parts = max(map(len, self.parts)), len(self.parts)
        shards = self.parts[0][0].shards
        texts = [
            f"{count} replicas" if count > 1 else "",
            f"{parts} parts" if parts > 1 else "",
            f"{shards} shards" if shards > 1 else "",
        ]
        return " of ".join(filter(None, texts)) or "one executor"


@dataclass(frozen=True)
class Fleet:
    """Machines, and the links between them."""

    machines: Mapping[str, Machine]
    links: Mapping[frozenset[str], LinkFigures] = field(default_factory=dict)

    def link(self, one: str, other: str) -> LinkFigures | None:
        """Return the link between two machines; None within one machine.

        Raises:
            UsageError: the file has no such link.
        """
        if one == other:
            return None
        found = self.links.get(frozenset((one, other))) or self.links.get(_ANY)
        if found is None:
            raise UsageError(f"there is no link between {one} and {other}; add it to [[links]]")
        return found


_ANY: frozenset[str] = frozenset()
_LAYERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(,lm_head)?$")


def read_fleet(data: Mapping[str, Any]) -> Fleet:
    """Return the machines and links of a file.

    ``[machines.NAME]`` has ``gpu`` (a name of :data:`~symbiosis.simulation.costs.GPUS`) or ``gb_per_s`` and ``tflops``,
    and ``memory_gib``; ``devices`` (1), ``count`` (1: machines named NAME, or NAME-0, NAME-1, …), and ``gbit_per_s``
    and ``latency_us`` of the link between its devices. ``[[links]]`` has ``between`` (two names, or nothing for all
    other pairs), ``gbit_per_s`` and ``latency_us``. ``executors`` and ``clients`` are for :func:`read_placement`.

    Raises:
        UsageError: something is missing, unknown or invalid.
    """
    _check_names("the file", data, ("machines", "links", "executors", "clients"))
    machines: dict[str, Machine] = {}
    tables = data.get("machines")
    if not isinstance(tables, dict) or not tables:
        raise UsageError('the file has no machine; add a table such as [machines.a] with gpu = "a100"')
    families: dict[str, list[str]] = {}
    for name, table in tables.items():
        where = f"[machines.{name}]"
        _check_names(where, table, _MACHINE)
        count = _whole(where, table, "count")
        families[name] = [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
        for each in families[name]:
            if each in machines:
                raise UsageError(f"{where}: two machines are called {each}; give each a name of its own")
            machines[each] = _machine(where, each, table)
    links: dict[frozenset[str], LinkFigures] = {}
    for number, table in enumerate(_tables(data, "links")):
        where = f"[[links]] number {number + 1}"
        _check_names(where, table, ("between", "gbit_per_s", "latency_us"))
        between = table.get("between", [])
        if not isinstance(between, list) or len(between) not in (0, 2):
            raise UsageError(f"{where}: between has two names of machines, or is left out for all other pairs")
        link = _link(where, table)
        if not between:
            links[_ANY] = link
            continue
        ends = [families[_named(where, name, families)] for name in between]
        links |= {frozenset((one, other)): link for one in ends[0] for other in ends[1]}
    return Fleet(machines, links)


def read_placement(data: Mapping[str, Any], fleet: Fleet, blocks: int) -> Placement:
    """Return the executors of a file. ``[[executors]]`` has ``machine``, and if it serves a part ``layers``, such as
    ``0-15`` or ``16-31,lm_head``, and ``shards`` (1). ``clients`` names the machine of the clients.

    Args:
        blocks: number of blocks of the model.

    Raises:
        UsageError: something is missing, unknown or invalid, or executors overlap or leave blocks out.
    """
    sites: dict[tuple[int, int], list[Site]] = {}
    for number, table in enumerate(_tables(data, "executors")):
        where = f"[[executors]] number {number + 1}"
        _check_names(where, table, ("machine", "layers", "shards"))
        name = _named(where, table.get("machine"), fleet.machines)
        served = _blocks(where, table.get("layers"), blocks)
        site = Site(name, served, _whole(where, table, "shards"))
        sites.setdefault((served.start, served.stop), []).append(site)
    if not sites:
        raise UsageError('the file has no executor; add [[executors]] with machine = "NAME"')
    at = 0
    for start, stop in sorted(sites):
        if start != at:
            raise UsageError(
                f"blocks {at} to {start - 1} are served nowhere"
                if start > at
                else f"block {start} is served twice, by executors that do not serve the same blocks"
            )
        at = stop
    if at != blocks:
        raise UsageError(f"blocks {at} to {blocks - 1} are served nowhere")
    clients = data.get("clients")
    if clients is not None:
        _named("clients", clients, fleet.machines)
    return Placement([sites[key] for key in sorted(sites)], clients)


def _named(where: str, name: object, machines: Collection[str]) -> str:
    """Return the name of a machine. Raises UsageError if there is none of this name."""
    if not isinstance(name, str) or name not in machines:
        raise UsageError(f"{where}: there is no machine {name!r}; machines are {', '.join(machines)}")
    return name


_MACHINE = ("gpu", "gb_per_s", "tflops", "memory_gib", "devices", "count", "gbit_per_s", "latency_us")


def _machine(where: str, name: str, table: Mapping[str, Any]) -> Machine:
    if "gpu" in table:
        gpu = table["gpu"]
        if not isinstance(gpu, str) or gpu not in GPUS:
            raise UsageError(f"{where}: no figures for gpu = {gpu!r}; there are {', '.join(GPUS)}")
        device = GPUS[gpu]
    else:
        device = Gpu(1e9 * _number(where, table, "gb_per_s"), 1e12 * _number(where, table, "tflops"))
    memory = _number(where, table, "memory_gib", device.memory_gib or None)
    between = _link(where, {"gbit_per_s": 2400, "latency_us": 5, **table})
    return Machine(name, device, _whole(where, table, "devices"), int(GIB * memory), between)


def _link(where: str, table: Mapping[str, Any]) -> LinkFigures:
    return LinkFigures(1e-6 * _number(where, table, "latency_us", 0), 1e9 / 8 * _number(where, table, "gbit_per_s"))


def _blocks(where: str, layers: object, blocks: int) -> range:
    if layers is None:
        return range(blocks)
    found = _LAYERS.match(str(layers))
    if not found:
        raise UsageError(f"{where}: layers is {layers!r}; write blocks such as 0-15 or 16-31,lm_head")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < blocks:
        raise UsageError(f"{where}: layers is {layers!r}; the model has blocks 0 to {blocks - 1}")
    if bool(found[3]) != (last == blocks - 1):
        raise UsageError(f"{where}: layers is {layers!r}; lm_head belongs to the executor of block {blocks - 1}")
    return range(first, last + 1)


def _tables(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = data.get(name, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise UsageError(f"{name} must be tables: write [[{name}]]")
    return found


def _check_names(where: str, table: Any, known: Sequence[str]) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    for name in table:
        if name not in known:
            raise UsageError(f"{where}: {name} is not known; there are {', '.join(known)}")


def _whole(where: str, table: Mapping[str, Any], name: str) -> int:
    value = table.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise UsageError(f"{where}: {name} is {value!r}; it must be a whole number, 1 or more")
    return value


def _number(where: str, table: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = table.get(name, default)
    if value is None:
        raise UsageError(f"{where}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{where}: {name} is {value!r}; it must be a number, 0 or more")
    if name != "latency_us" and value == 0:
        raise UsageError(f"{where}: {name} is 0; it must be more")
    return float(value)
