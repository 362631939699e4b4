"""Which modules of a model become base layers, and which of them an executor serves."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from torch import nn

from symbiosis.core.share import block_of
from symbiosis.errors import SplitError, UsageError
from symbiosis.executor.experts import is_bank
from symbiosis.executor.layers import is_linear

MLP_NAMES = ("mlp", "feed_forward", "ffn", "ff", "fc")
"""Names that models of transformers give to the MLP of a block."""
HEADS = ("score", "classifier", "qa_outputs")
"""Ends of the names of heads that PEFT trains in full for classification and question answering."""
NOT_CHOSEN = "it is not named in base_layers"
"""Reason why a layer that could be served is not, where names or patterns choose the base layers."""


def check_names(
    model: nn.Module, base_layers: str | Sequence[str], layers: str | None, allow_weights: Sequence[str]
) -> None:
    """Raise what :class:`~symbiosis.executor.splitting.SplitModel` raises for names that no module of a model has.

    The model needs no weights, so that a wrong name is reported before they are loaded.
    """
    chosen, _ = choose(model, base_layers)
    if layers is not None:
        served_of(chosen, layers)
    allowed_of([name for name in chosen if is_linear(model.get_submodule(name))], allow_weights)


def choose(model: nn.Module, base_layers: str | Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the modules to serve, each object once, in the order in which the model defines them; and
    those that are left out by rule or by the patterns, with the reason."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    if base_layers in ("linear", "mlp"):
        left_out = {name: why for name in linear if (why := _not_for_tenants(model, name))}
        chosen = {name for name in linear if name not in left_out}
        chosen |= {name for name, module in modules.items() if is_bank(module)}
        if base_layers == "mlp":
            chosen |= {name for name, module in modules.items() if _is_mlp(name, module)}
        return [name for name in modules if name in chosen], left_out
    several = base_layers if isinstance(base_layers, Iterable) else ()
    patterns = [base_layers] if isinstance(base_layers, str) else list(several)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(
            f"base_layers is {base_layers!r}; give 'linear', 'mlp', or one or more module names or patterns"
        )
    names = [name for name in modules if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SplitError(
                f"base_layers: no module matches {pattern!r}; module names look like {', '.join(map(repr, linear[:3]))}"
            )
    named = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    others = {*linear, *(name for name, module in modules.items() if is_bank(module))}.difference(named)
    return named, dict.fromkeys(others, NOT_CHOSEN)


_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def served_of(names: Sequence[str], layers: str) -> set[str]:
    """Return the names of base layers that a string such as ``"0-15,lm_head"`` stands for.

    Raises:
        UsageError: it is no string.
        SplitError: a part of the string stands for none of them.
    """
    if not isinstance(layers, str):
        raise UsageError(f"layers is {layers!r}; give a text such as '0-15,lm_head'")
    found: set[str] = set()
    numbers_of = {name: block_of(name).rpartition(".")[2] for name in names}
    blocks = {name: int(number) for name, number in numbers_of.items() if number.isdecimal()}
    largest, others = max(blocks.values(), default=-1), [name for name in names if name not in blocks]
    there = f"there are blocks 0 to {largest}{f', and {chr(44).join(others[:5])}' if others else ''}"
    for part in layers.split(","):
        if numbers := _RANGE.fullmatch(part.strip()):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if last > largest:
                raise SplitError(f"layers: there is no block {last}; {there}")
            mine = {name for name, block in blocks.items() if first <= block <= last}
        else:
            mine = set(fnmatch.filter(names, part.strip()))
        if not mine:
            raise SplitError(f"layers: no base layer belongs to {part.strip()!r}; {there}")
        found |= mine
    return found


def allowed_of(linear: Sequence[str], patterns: Iterable[str]) -> set[str]:
    """Return the linear base layers that patterns of ``allow_weights`` match. Raises SplitError if one matches none."""
    found: set[str] = set()
    for pattern in patterns:
        names = fnmatch.filter(linear, pattern)
        if not names:
            shown = ", ".join(map(repr, linear[:3]))
            raise SplitError(
                f"allow_weights: {pattern!r} matches no linear base layer with a plain weight; names look like {shown}"
            )
        found.update(names)
    return found


def _not_for_tenants(model: nn.Module, name: str) -> str | None:
    """Return why a linear layer is no base layer, or None."""
    head = name.partition(".")[0]
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight"
    return f"the head {head} is the tenant's" if head.endswith(HEADS) else None


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Return whether a module is named like an MLP and has two or more linear layers and no other parameters."""
    inside = [child for child in module.modules() if child is not module]
    linears = [child for child in inside if is_linear(child)]
    return (
        name.rpartition(".")[2] in MLP_NAMES
        and len(linears) >= 2
        and all(child in linears or not any(True for _ in child.parameters()) for child in inside)
    )
