"""What tenants do and which layers run, as plain data: the part of an executor's status that ``symbiosis top`` shows.

All numbers but ``clients``, ``held_bytes`` and ``blocks`` only grow, so two states tell what happened between them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from symbiosis.core.terms import tenant_of
from symbiosis.executor.statistics import ClientStatistics, LayerStatistics, Statistics

_BLOCK = re.compile(r"\.(\d+)\.")


def activity_of(counts: Statistics, clients: Iterable[str], held: Mapping[str, int]) -> dict[str, Any]:
    """Return the activity behind some counts.

    Args:
        counts: the executor's.
        clients: names of the clients that have joined.
        held: bytes that count for the connections of each client.
    """
    joined = Counter(map(tenant_of, clients))
    held_bytes: Counter[str] = Counter()
    for client, size in held.items():
        held_bytes[tenant_of(client)] += size
    return {
        "batches": counts.batches,
        "members": counts.members,
        "run_s": counts.run_s,
        "tenants": {
            name: _of_tenant(counts.tenants.get(name, _NONE))
            | {"clients": joined[name], "held_bytes": held_bytes[name]}
            for name in counts.tenants.keys() | joined.keys()
        },
        "layers": _of_layers(counts.layers),
        "apart": {
            f"{1e3 * bound:g} ms": count for bound, count in zip(counts.apart.bounds, counts.apart.counts, strict=False)
        },
    }


_NONE = ClientStatistics(0, 0, 0.0, 0.0)


def _of_tenant(counts: ClientStatistics) -> dict[str, Any]:
    record = counts._asdict()
    record["members"] = record.pop("mean_batch") * counts.requests
    return record


def _of_layers(layers: Mapping[str, LayerStatistics]) -> dict[str, dict[str, float]]:
    """Return the sums over equal layers of all blocks, by a name such as ``model.layers.*.mlp.up_proj forward``."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, counts in layers.items():
        found[_BLOCK.sub(".*.", name, 1)].update({"blocks": 1, **counts._asdict()})
    return {name: dict(sums) for name, sums in found.items()}


def layers_text(names: Iterable[str]) -> str:
    """Return base layers as text for people: ``7 layers in each of 4 blocks, and lm_head``."""
    blocks: defaultdict[str, Counter[str]] = defaultdict(Counter)
    others = []
    for name in names:
        found = _BLOCK.search(name)
        if found:
            blocks[name[: found.start()]][found[1]] += 1
        else:
            others.append(name)
    texts = []
    for stack, counts in blocks.items():
        few, most = min(counts.values()), max(counts.values())
        each = f"{few} to {most} layers" if few < most else "1 layer" if most == 1 else f"{most} layers"
        where = f"each of {len(counts)} blocks" if len(counts) > 1 else "1 block"
        texts.append(f"{each} in {where}{f' of {stack}' if len(blocks) > 1 else ''}")
    texts += others if len(others) <= 3 else [f"{len(others)} other layers"]
    return ", and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
