"""After wrong use, the message states the error, the value and what to do instead. No other client is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis import errors
from symbiosis.errors import CannotWaitError, ClientClosedError, PlaceholderError, RequestError, UsageError
from tests.helpers import BATCH, IDS, adamw, lora


@pytest.fixture
async def client(base: Any) -> AsyncIterator[symbiosis.Client]:
    async with symbiosis.Executor(base) as executor, executor.client(lora(), name="alice") as client:
        yield client
        if not client.closed:
            assert torch.isfinite((await client.forward(input_ids=IDS)).logits).all()
        assert executor.engine.scheduler.outstanding == 0
        assert executor.engine.scheduler.thinking == 0


def test_errors_form_one_tree() -> None:
    """Every public error has the same root and one of three branches, and a docstring of its own."""
    assert set(errors.__all__) == {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    branches = (errors.UsageError, errors.PeerError, errors.BrokenError)
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.SymbiosisError)
        assert error is errors.SymbiosisError or sum(issubclass(error, branch) for branch in branches) == 1
        assert error.__doc__


async def test_model_called_on_the_loop(client: symbiosis.Client) -> None:
    with pytest.raises(CannotWaitError, match=r"called directly on the event loop.*await client\.forward"):
        client.model(input_ids=IDS)
    with pytest.raises(CannotWaitError, match="event loop"):
        client.model.generate(input_ids=IDS, max_new_tokens=2)


async def test_backward_called_on_the_loop(client: symbiosis.Client) -> None:
    output = await client.forward(**BATCH)
    with pytest.raises(CannotWaitError, match=r"event loop.*await client\.backward\(loss\)"):
        output.loss.backward()


async def test_backward_inside_a_fiber(client: symbiosis.Client) -> None:
    def step() -> None:
        client.model(**BATCH).loss.backward()

    with pytest.raises(CannotWaitError, match=r"inside a fiber.*return the loss.*await client\.backward\(loss\)"):
        await client.run(step)


async def test_operations_inside_a_fiber(client: symbiosis.Client) -> None:
    """The function waits in synchronous code and drives the coroutine by hand."""

    def nested() -> None:
        coroutine = client._in_fiber(client.model, input_ids=IDS)
        try:
            coroutine.send(None)
        finally:
            coroutine.close()

    with pytest.raises(CannotWaitError, match="await it in a coroutine"):
        await client.run(nested)


@pytest.mark.parametrize("what", ["forward", "generate", "backward", "train_step", "run"])
async def test_client_used_after_close(client: symbiosis.Client, what: str) -> None:
    output = await client.forward(**BATCH)
    optimizer = adamw(client.model)
    await client.close()
    calls = {
        "forward": lambda: client.forward(input_ids=IDS),
        "generate": lambda: client.generate(input_ids=IDS),
        "backward": lambda: client.backward(output.loss),
        "train_step": lambda: client.train_step(BATCH, optimizer),
        "run": lambda: client.run(client.model, IDS),
    }
    with pytest.raises(ClientClosedError, match="client 'alice' is closed"):
        await calls[what]()


async def test_model_used_after_close(client: symbiosis.Client) -> None:
    await client.close()
    with pytest.raises(ClientClosedError, match="closed"):
        await asyncio.to_thread(client.model, IDS)


async def test_client_used_before_open(client: symbiosis.Client, base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        early = executor.client(lora(), name="early")
        with pytest.raises(UsageError, match="'early' is not open yet; use `async with"):
            early.model  # noqa: B018
        with pytest.raises(UsageError, match=r"'early' is not open yet.*seed=3"):
            early.manual_seed(3)
        for call in (lambda: early.forward(input_ids=IDS), lambda: early.train_step(BATCH, adamw(client.model))):
            with pytest.raises(UsageError, match="'early' is not open yet"):
                await call()


@pytest.mark.parametrize("value", ["pissa", "olora"])
async def test_initialisations_that_factor_weights(client: symbiosis.Client, base: Any, value: str) -> None:
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(PlaceholderError, match=rf"init_lora_weights='{value}'.*use True, 'gaussian'"):
            async with executor.client(lora(init_lora_weights=value, lora_dropout=0)):
                pytest.fail("the client was opened")


async def test_errors_of_transformers_are_raised_unchanged(client: symbiosis.Client) -> None:
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        await client.forward()
    with pytest.raises(IndexError):
        await client.forward(input_ids=torch.tensor([[10**6]]))


@pytest.mark.parametrize("kind", ["decode", 2])
async def test_unknown_kinds(base: Any, kind: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(UsageError, match=rf"kind is {kind!r}; .*Kind\.DECODE, Kind\.PREFILL, Kind\.FINETUNE"):
            executor.client(kind=kind)


async def test_messages_contain_no_rows(client: symbiosis.Client) -> None:
    """A message may reach a log that other people read: it has shapes and dtypes, and never values."""
    with pytest.raises(RequestError, match=r"q_proj: .*autocast") as caught:
        await client.forward(inputs_embeds=torch.full((1, 4, 32), 0.123456, dtype=torch.float64))
    assert "0.12" not in str(caught.value)
