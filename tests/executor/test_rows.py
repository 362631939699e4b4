"""Merge and split, alone and through the runner with real layers: every request gets its own rows back, however
requests are cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Batch, Call, Key, Pass, Request, Slice
from symbiosis.core.terms import Kind
from symbiosis.executor.layers import base_layer
from symbiosis.executor.runner import Runner, merge, split

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
counts = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(counts=counts, width=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
def test_split_undoes_merge(counts: list[int], width: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(count, width).to(dtype) for count in counts]
    whole = merge(parts)
    assert whole.shape == (sum(counts), width)
    back = split(whole, counts)
    assert len(back) == len(parts)
    for part, original in zip(back, parts, strict=True):
        assert part.dtype is dtype
        assert torch.equal(part, original)


def test_one_part_is_not_copied() -> None:
    part = torch.randn(3, 4)
    assert merge([part]) is part
    assert split(part, [3])[0] is part


def test_several_parts_share_no_storage() -> None:
    """A tenant must not reach the rows of another tenant through the storage of its own rows."""
    whole = torch.randn(5, 4)
    storages = {part.untyped_storage().data_ptr() for part in split(whole, [2, 2, 1])}
    assert len(storages) == 3
    assert whole.untyped_storage().data_ptr() not in storages
    for part in split(whole, [2, 2, 1]):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize("wrong", [[2, 2], []])
def test_counts_must_add_up(wrong: list[int]) -> None:
    with pytest.raises(RuntimeError, match="sum exactly to 5"):
        split(torch.randn(5, 4), wrong)


def _layers() -> list[Any]:
    torch.manual_seed(0)
    conv = Conv1D(7, 5)
    nn.init.normal_(conv.bias)
    mlp = nn.Sequential(nn.Linear(5, 11), nn.GELU(), nn.Linear(11, 7))
    modules = [nn.Linear(5, 7), nn.Linear(5, 3, bias=False), conv, mlp]
    return [
        base_layer(index, f"layer{index}", module.requires_grad_(False).double())
        for index, module in enumerate(modules)
    ]


LAYERS = _layers()
KEYS = [
    Key((0,), Pass.FORWARD),
    Key((0,), Pass.FORWARD_WITHOUT_BIAS),
    Key((0,), Pass.BACKWARD),
    Key((0, 1, 2), Pass.FORWARD),
    Key((2,), Pass.FORWARD_WITHOUT_BIAS),
    Key((2,), Pass.BACKWARD),
    Key((3,), Pass.FORWARD),
    Key((3,), Pass.BACKWARD),
]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Key, list[int], list[list[tuple[int, int]]]]:
    """Return a key, the rows of each request, and batches of (request, rows) in any order that keeps each request's own
    order.
    """
    key = draw(st.sampled_from(KEYS))
    rows = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    left = dict(enumerate(rows))
    batches = []
    while left:
        members = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, max_size=len(left), unique=True))
        batch = [(number, draw(st.integers(1, left[number]))) for number in members]
        for number, count in batch:
            left[number] -= count
            if not left[number]:
                del left[number]
        batches.append(batch)
    return key, rows, batches


@settings(max_examples=200)
@given(cut=cuts(), seed=st.integers(0, 99))
def test_any_cut_gives_each_request_its_own(cut: tuple[Key, list[int], list[list[tuple[int, int]]]], seed: int) -> None:
    """Results are compared with the modules themselves and autograd, in float64, where blocking changes less than
    1e-12.
    """
    key, rows, batches = cut
    generator = torch.Generator().manual_seed(seed)
    spec = LAYERS[key.layers[0]].spec
    widths = [spec.in_features] if key.pass_ is not Pass.BACKWARD else [spec.out_features]
    if key.pass_ is Pass.BACKWARD and not spec.linear:
        widths = [spec.in_features, spec.out_features]
    calls = [
        Call(key, Kind.FINETUNE, tuple(torch.randn(n, w, generator=generator, dtype=torch.float64) for w in widths))
        for n in rows
    ]
    sent = [tuple(tensor.clone() for tensor in call.tensors) for call in calls]
    requests = [Request(number, f"client{number}", key, n, Kind.FINETUNE, 0.0) for number, n in enumerate(rows)]
    runner = Runner(LAYERS)
    for batch in batches:
        slices = []
        for number, count in batch:
            request = requests[number]
            slices.append(Slice(request, request.taken, request.taken + count))
            request.taken += count
        runner.run(Batch(key, slices, "test", sum(count for _, count in batch)), [calls[number] for number, _ in batch])
    for call, mine in zip(calls, sent, strict=True):
        assert call.results is not None
        assert all(torch.equal(now, before) for now, before in zip(call.tensors, mine, strict=True))
        for result, wanted in zip(call.results, expected(key, mine), strict=True):
            assert result.dtype is torch.float64
            assert result.shape == wanted.shape
            assert not result.requires_grad
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)


def expected(key: Key, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Compute the expected results with the modules themselves."""
    results = []
    for index in key.layers:
        module = LAYERS[index].module
        if key.pass_ is Pass.BACKWARD:
            x = tensors[0] if len(tensors) == 2 else torch.zeros(tensors[0].shape[0], 5, dtype=torch.float64)
            x = x.clone().requires_grad_()
            results.append(torch.autograd.grad(module(x), x, tensors[-1])[0])
        else:
            y = module(tensors[0])
            results.append(y - module.bias if key.pass_ is Pass.FORWARD_WITHOUT_BIAS else y)
    return results
