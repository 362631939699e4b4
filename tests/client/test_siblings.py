"""Groups of layers that read the same rows, on threads that share them."""

from __future__ import annotations

from typing import Any

import torch

from symbiosis.client.siblings import Siblings, SiblingState
from symbiosis.core.requests import Key, LayerSpec, Pass


class Layer:
    """A layer that counts the results it asks for."""

    asked = 0

    def __init__(self, number: int) -> None:
        self.spec = LayerSpec(number, f"model.layers.0.attn.{number}", 4, 4, torch.float32, bias=False, linear=True)
        self.siblings: Siblings | None = None
        self.may_have_siblings = True

    def is_in_model_of(self, other: Any) -> bool:
        return True

    def request(self, key: Key, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.asked += 1
        return (x,) * len(key.layers)

    def join(self, group: Siblings) -> None:
        self.siblings = group

    def leave_for_good(self) -> None:
        self.siblings, self.may_have_siblings = None, False

    def call(self, here: SiblingState, x: torch.Tensor) -> None:
        if self.siblings is None:
            here.watch(self, x, Pass.FORWARD)
        else:
            here.result(self, self.siblings, x, Pass.FORWARD)


def test_a_group_that_another_thread_forms_in_the_middle_of_a_walk_lasts() -> None:
    layers = [Layer(number) for number in range(3)]
    first, *others = [(SiblingState(), torch.ones(1, 4)) for _ in range(5)]
    for here, x in others:
        layers[0].call(here, x)
    for layer in layers:
        layer.call(*first)
    first[0].forget()
    group = layers[0].siblings
    assert group is not None
    for here, x in others:
        for layer in layers[1:]:
            layer.call(here, x)
        assert not here.fetched
    assert not group.misses
    assert [layer.asked for layer in layers] == [0, len(others), 0]
