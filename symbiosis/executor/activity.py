"""What tenants do and which layers run, as plain data: the part of an executor's status that ``symbiosis top`` shows.

All numbers but ``clients`` and ``held_bytes`` only grow, so the difference of two states is what happened between them.
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
    return {**record, "members": record.pop("mean_batch") * counts.requests}


def _of_layers(layers: Mapping[str, LayerStatistics]) -> dict[str, dict[str, float]]:
    """Return the sums over equal layers of all blocks, by a name for people and the pass."""
    groups: defaultdict[tuple[str, str], list[tuple[str, LayerStatistics]]] = defaultdict(list)
    for key, counts in layers.items():
        name, _, pass_ = key.partition(" ")
        groups[_BLOCK.sub(".*.", name, 1), pass_].append((name, counts))
    found: dict[str, dict[str, float]] = {}
    for (pattern, pass_), members in groups.items():
        _, inside, path = pattern.partition(".*.")
        blocks = len({name for name, _ in members})
        text = f"{path} in each of {blocks} blocks" if inside and blocks > 1 else members[0][0]
        sums = zip(LayerStatistics._fields, map(sum, zip(*(counts for _, counts in members), strict=True)), strict=True)
        found[f"{text if f'{text}, {pass_}' not in found else pattern}, {pass_}"] = dict(sums)
    return found


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
