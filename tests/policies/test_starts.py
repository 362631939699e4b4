"""Where the walks of a client begin, by the keys of its requests."""

from __future__ import annotations

import pytest

from symbiosis.core.requests import Key, Pass, Request
from symbiosis.core.terms import Kind
from symbiosis.policies.starts import Starts, WalkStarts


def key(step: str) -> Key:
    """Return the key for a layer, such as ``"3"``, for its norms (``"3n"``), in fp32 (``"3f"``), with a sibling
    (``"3s"``), or for its backward pass (``"3b"``)."""
    pass_ = {"n": Pass.NORMS, "b": Pass.BACKWARD}.get(step[-1], Pass.FORWARD)
    layer = int(step.rstrip("nfsb"))
    return Key((layer, layer + 1) if step.endswith("s") else (layer,), pass_, fp32=step.endswith("f"))


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
        "|0s 0 1 2s 2 |0s 0",  # OFT in a joint walk, whose rows the siblings do not get
        "|0 1 2 |0s 2 |0s 2",  # siblings are asked for one by one in the first walk
        "|0 0n 0f |0 0n 0f |0 0s",  # two and more keys of one layer end a walk, too
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


def test_fine_tuning_has_walks_of_its_own() -> None:
    """Another thread of the client may do it."""
    starts = Starts()
    asked = [(0, Kind.DECODE), (0, Kind.FINETUNE), (1, Kind.DECODE), (1, Kind.FINETUNE), (0, Kind.DECODE)]
    found = [starts.begins(Request(n, "a", key(str(layer)), 1, kind, 0.0)) for n, (layer, kind) in enumerate(asked)]
    assert found == [True, True, False, False, True]
