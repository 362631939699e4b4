"""Where the walks of a client begin, by the keys of its requests."""

from __future__ import annotations

import pytest

from symbiosis.core.requests import Key, Pass, Request
from symbiosis.core.terms import Kind
from symbiosis.core.walk_starts import WalkStarts
from symbiosis.policies.starts import Starts


def key(step: str) -> Key:
    """Return the key for a layer, such as ``"3"``, for its norms (``"3n"``), or for its backward pass (``"3b"``)."""
    pass_ = {"n": Pass.NORMS, "b": Pass.BACKWARD}.get(step[-1], Pass.FORWARD)
    return Key((int(step.rstrip("nb")),), pass_)


@pytest.mark.parametrize(
    "steps",
    [
        "|0 1 2 3 |0 1 2 3 |0",
        "|1 0 2 3 5 4 6 7 |1 0 2 3 5 4 6 7",  # Phi-3
        "|0 1 2 3 |2 3 |2 3 |2 3",  # an encoder, and tokens of a decoder
        "|0 1 2 |0 |0 |0",
        "|0n 0 1n 1 2 |0n 0 1n 1 2",  # DoRA
        "|0 1 2 2b 1b |0 1 2 2b 1b |0",  # training
        "|0 1 2 2b |1 1b |0 0b |0",  # training that recomputes blocks in its backward pass
    ],
)
def test_walks(steps: str) -> None:
    starts = WalkStarts()
    for step in steps.split():
        assert starts.begins(key(step.lstrip("|"))) == step.startswith("|"), step


def test_walks_of_each_client_and_kind() -> None:
    starts, found = Starts(), []
    asked = [("a", 0, Kind.PREFILL), ("b", 0, Kind.DECODE), ("a", 1, Kind.PREFILL), ("b", 1, Kind.DECODE)]
    asked += [("a", 2, Kind.DECODE), ("b", 0, Kind.DECODE), ("a", 3, Kind.DECODE), ("a", 2, Kind.PREFILL)]
    for number, (client, layer, kind) in enumerate(asked):
        found.append(starts.begins(Request(number, client, key(str(layer)), 1, kind, 0.0)))
    assert found == [True, True, False, False, True, True, False, True]
