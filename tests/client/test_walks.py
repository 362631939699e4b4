"""Synchronous clients are in a walk during forward and backward passes, on any number of threads, until each ends or
fails.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.client.open_model import WalkCounter
from tests.helpers import IDS, in_thread


class Channel:
    def __init__(self) -> None:
        self.said: list[str] = []

    def begin_walk(self) -> None:
        self.said.append("begin")

    def end_walk(self) -> None:
        self.said.append("end")


@pytest.fixture
def channel() -> Channel:
    return Channel()


class Layer(torch.autograd.Function):
    """A layer whose backward pass reports to the walk and then calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, walk: WalkCounter, then: Any) -> torch.Tensor:
        ctx.walk, ctx.then = walk, then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.walk.backward_begins()
        ctx.then()
        return dy, None, None


def backward(walk: WalkCounter, then: Any, layers: int = 1) -> None:
    y = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        for _ in range(layers):
            y = Layer.apply(y, walk, then)  # type: ignore[no-untyped-call]
        y.sum().backward()


def test_walks_that_overlap(channel: Any) -> None:
    """The walk lasts from the first begin to the last end, whichever thread calls it."""
    walk = WalkCounter(channel)

    def inner() -> list[str]:
        return list(channel.said)

    def outer() -> list[str]:
        walk.forward(inner, (), {})
        return list(channel.said)

    assert walk.forward(outer, (), {}) == ["begin"]
    assert channel.said == ["begin", "end"]


def test_many_threads(channel: Any) -> None:
    walk = WalkCounter(channel)

    def work() -> None:
        for _ in range(200):
            walk.forward(backward, (walk, lambda: None), {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert channel.said
    assert channel.said == ["begin", "end"] * (len(channel.said) // 2)


def test_backward_passes_that_overlap(channel: Any) -> None:
    walk, both = WalkCounter(channel), threading.Barrier(2, timeout=30)
    first_is_through = threading.Event()

    def first() -> None:
        backward(walk, both.wait)
        first_is_through.set()

    thread = threading.Thread(target=first)
    thread.start()

    def second() -> None:
        both.wait()
        assert first_is_through.wait(30)
        assert channel.said == ["begin"]

    backward(walk, second)
    thread.join(30)
    assert channel.said == ["begin", "end"]


def test_one_backward_pass_is_one_walk(channel: Any) -> None:
    """A backward pass that runs another one inside, as reentrant checkpoints do, is still one walk."""
    walk = WalkCounter(channel)
    backward(walk, lambda: backward(walk, lambda: None), layers=3)
    assert channel.said == ["begin", "end"]


def test_a_backward_pass_that_fails_has_ended(channel: Any) -> None:
    """Otherwise the executor's other clients would always wait for this client."""
    walk = WalkCounter(channel)

    def fail() -> None:
        raise ValueError("on purpose")

    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            backward(walk, fail)
    assert channel.said == ["begin", "end"] * 2


@pytest.mark.parametrize("copied", [False, True])
async def test_threads_that_share_an_opened_model(base: Any, tmp_path: Path, copied: bool) -> None:
    """Each thread runs forward and backward on its own rows, and gets the logits and gradients of the plain model."""
    plain = base.get_input_embeddings().weight.detach()

    def gradient(model: Any, n: int) -> torch.Tensor:
        rows = plain[IDS + n].clone().requires_grad_()
        model(inputs_embeds=rows).logits.square().sum().backward()
        assert rows.grad is not None
        return rows.grad

    def logits(model: Any, n: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(IDS + n).logits
        return found

    jobs = (logits, gradient)
    expected = [[job(base, n) for job in jobs] for n in range(4)]

    def tenant() -> list[float]:
        worst = [1.0] * 4
        with symbiosis.open_model(f"shm://{tmp_path}/s.sock") as model:
            models = [model, copy.deepcopy(model)] if copied else [model, model]

            def work(n: int) -> None:
                difference = 0.0
                for turn in range(32):
                    for job, right in list(zip(jobs, expected[n], strict=True))[: 1 if turn % 8 else 2]:
                        difference = max(difference, float((job(models[n % 2], n) - right).abs().max() / right.max()))
                worst[n] = difference

            threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            for layer in (one.model.layers[0].self_attn.q_proj for one in models):
                assert len(layer.siblings.members) == 3  # siblings still share their requests
        return worst

    async with symbiosis.Executor(base) as executor:
        await executor.listen(f"shm://{tmp_path}/s.sock")
        assert max(await in_thread(tenant)) < 1e-5


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_a_forward_pass_that_fails_has_ended(base: Any, tmp_path: Path, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error("on purpose")

    def walk(model: Any) -> None:
        for module in (model, model.model.layers[1]):
            hook = module.register_forward_pre_hook(fail)
            with pytest.raises(error, match="on purpose"):
                model(IDS)
            hook.remove()

    async with symbiosis.Executor(base) as executor:
        await executor.listen(f"shm://{tmp_path}/s.sock")
        opened = symbiosis.open_model(f"shm://{tmp_path}/s.sock")
        await in_thread(walk, await in_thread(opened.__enter__))
        assert await executor.drain(10)
        await in_thread(opened.__exit__, None, None, None)


def test_a_walk_that_cannot_begin_leaves_nothing_open() -> None:
    class Interrupted(Channel):
        def begin_walk(self) -> None:
            super().begin_walk()
            if len(self.said) == 1:
                raise KeyboardInterrupt

    channel: Any = Interrupted()
    walk = WalkCounter(channel)
    with pytest.raises(KeyboardInterrupt):
        walk.forward(lambda: None, (), {})
    walk.forward(lambda: None, (), {})
    assert channel.said == ["begin", "begin", "end"]
