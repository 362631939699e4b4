"""Tests of the client: its operations, modes, random numbers, threads and adapters."""

from __future__ import annotations

import asyncio
import copy
import gc
import getpass
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from transformers import CompileConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

import symbiosis
from symbiosis.client.connect import new_name
from symbiosis.client.cores import end_helpers
from symbiosis.errors import ClientClosedError, ExecutorClosedError, SplitError, UsageError
from symbiosis.testing import tiny_model
from tests.helpers import BATCH, IDS, METHODS, adamw, crowd, ia3, lora, parameters, prefix, until


@pytest.fixture
async def executor(base: Any) -> AsyncIterator[symbiosis.Executor]:
    async with symbiosis.Executor(base) as executor:
        yield executor


async def test_forward_gives_the_models_own_output(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        assert isinstance(client.model, peft.PeftModel)
        output = await client.forward(input_ids=IDS, labels=IDS)
        assert isinstance(output, CausalLMOutputWithPast)
        assert output.logits.shape == (2, 9, 64)
        assert output.loss.requires_grad
        assert isinstance(await client.forward(input_ids=IDS, return_dict=False), tuple)


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_client_of_a_user_without_a_name_has_one(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """In a container, for example."""
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=error("uid not found")))
    assert new_name().startswith(f"uid{os.getuid()}-{os.getpid()}-")


async def test_without_an_adapter_the_output_is_that_of_the_base_model(base: Any) -> None:
    expected = copy.deepcopy(base)(input_ids=IDS).logits
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        assert not isinstance(client.model, peft.PeftModel)
        assert isinstance(client.model, type(base))
        assert not any(parameter.requires_grad for parameter in client.model.parameters())
        assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)


async def test_modes(executor: symbiosis.Executor) -> None:
    """A client starts in evaluation mode. train_step leaves training mode on, generate restores the mode, forward keeps
    it.
    """
    async with executor.client(lora()) as client:
        assert not client.model.training
        await client.forward(input_ids=IDS)
        assert not client.model.training
        await client.train_step(BATCH, adamw(client.model))
        assert client.model.training
        seen: list[bool] = []
        hook = client.model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
        options = {"input_ids": IDS, "max_new_tokens": 3, "min_new_tokens": 3}
        first = await client.generate(**options)
        hook.remove()
        assert client.model.training
        assert not any(seen)
        assert torch.equal(first, await client.generate(**options))  # no dropout
        await client.forward(input_ids=IDS)
        assert client.model.training


async def test_generate_restores_the_mode_when_it_fails(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        client.model.train()
        with pytest.raises(ValueError, match="temperature"):
            await client.generate(input_ids=IDS, max_new_tokens=2, do_sample=True, temperature=-1.0)
        assert client.model.training


@pytest.mark.parametrize("window", [None, 3])
async def test_a_step_that_fails_leaves_no_gradients(executor: symbiosis.Executor, window: int | None) -> None:
    """Otherwise a tenant that repeats the step would train on a part of the batch twice."""
    async with executor.client(lora()) as client:
        optimizer = adamw(client.model)
        first = next(parameter for parameter in client.model.parameters() if parameter.requires_grad)
        before = first.detach().clone()

        def fails(gradient: torch.Tensor) -> None:
            raise RuntimeError("in the last moment")

        hook = first.register_hook(fails)
        with pytest.raises(RuntimeError, match="in the last moment"):
            await client.train_step(BATCH, optimizer, window=window)
        hook.remove()
        assert all(parameter.grad is None for parameter in client.model.parameters())
        assert torch.equal(first, before)
        await client.train_step(BATCH, optimizer, window=window)
        assert not torch.equal(first, before)


@pytest.mark.parametrize("window", [None, 4])
async def test_a_step_without_gradients(executor: symbiosis.Executor, window: int | None) -> None:
    async with executor.client(lora()) as client:
        with torch.no_grad(), pytest.raises(UsageError, match=r"needs gradients, .* outside torch\.no_grad"):
            await client.train_step(BATCH, adamw(client.model), window=window)


async def test_an_optimizer_that_fails_leaves_no_gradients(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        optimizer = adamw(client.model)
        optimizer.register_step_pre_hook(Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            await client.train_step(BATCH, optimizer)
        assert all(parameter.grad is None for parameter in client.model.parameters())


async def test_a_forward_that_a_library_replaces(
    executor: symbiosis.Executor, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    own = type(base).forward

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    async with executor.client(lora()) as before:
        await before.forward(input_ids=IDS)
        monkeypatch.setattr(type(base), "forward", replaced)
        await before.forward(input_ids=IDS)
        async with executor.client(lora()) as after:
            await after.forward(input_ids=IDS)
    assert len(calls) == 2


async def test_train_step(executor: symbiosis.Executor, base: Any) -> None:
    """train_step returns the loss as a float, updates parameters and clears gradients, like a training step written by
    hand.
    """
    async with executor.client(lora(lora_dropout=0.0), seed=2) as client:
        optimizer = torch.optim.SGD([p for p in client.model.parameters() if p.requires_grad], lr=0.5)
        before = parameters(client.model)
        loss = await client.train_step(BATCH, optimizer)
        assert type(loss) is float
        assert all(p.grad is None for p in client.model.parameters())
        after = parameters(client.model)
        assert all(not torch.equal(after[name], before[name]) for name in before)
    torch.manual_seed(2)
    plain = peft.get_peft_model(copy.deepcopy(base), lora(lora_dropout=0.0)).train()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    expected = plain(**BATCH).loss
    expected.backward()
    optimizer.step()
    assert loss == expected.item()
    for name, value in parameters(plain).items():
        assert torch.equal(value, after[name]), name


async def test_backward_takes_its_options(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        output = await client.forward(**BATCH)
        await client.backward(output.loss, retain_graph=True)
        first = {name: p.grad.clone() for name, p in client.model.named_parameters() if p.grad is not None}
        assert first
        await client.backward(output.loss)
        for name, p in client.model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, 2 * first[name])


async def test_gradient_accumulation_and_custom_loss(executor: symbiosis.Executor, base: Any) -> None:
    """The tenant's own loss is computed from two forward passes. Two backward passes give the sum of their gradients,
    as in plain PEFT."""

    def loss(model: Any) -> torch.Tensor:
        a, b = (model(input_ids=ids).logits for ids in (IDS[:1], IDS[1:]))
        return a.logsumexp(-1).mean() + b.pow(2).mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain = peft.get_peft_model(copy.deepcopy(base), lora()).eval()
    async with executor.client(lora(), seed=0) as client:
        for _ in range(2):
            await client.backward(await client.run(loss, client.model))
            loss(plain).backward()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        for name, p in client.model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(p.grad, expected.pop(name))
    assert not expected


async def test_run_passes_arguments_results_and_errors(executor: symbiosis.Executor) -> None:
    async with executor.client() as client:
        assert await client.run(divmod, 7, 3) == (2, 1)
        assert await client.run(sorted, [2, 1], reverse=True) == [2, 1]
        with pytest.raises(ZeroDivisionError):
            await client.run(divmod, 1, 0)


async def test_seeds(executor: symbiosis.Executor) -> None:
    """manual_seed restarts the client's own stream, and changes neither torch's stream nor that of another client."""
    options = {"input_ids": IDS, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": True}
    async with executor.client(seed=1) as a, executor.client(seed=1) as b:
        before = torch.get_rng_state()
        first, same = await asyncio.gather(a.generate(**options), b.generate(**options))
        assert torch.equal(first, same)
        assert not torch.equal(first, await a.generate(**options))  # the stream has advanced
        a.manual_seed(1)
        assert torch.equal(first, await a.generate(**options))
        assert torch.equal(torch.get_rng_state(), before)


async def test_clients_without_a_seed(executor: symbiosis.Executor) -> None:
    """Each has numbers of its own, and torch has others, all of which follow from torch's seed."""

    async def drawn() -> list[float]:
        torch.manual_seed(3)
        async with executor.client() as a, executor.client() as b:
            numbers = torch.cat([await a.run(torch.rand, 9), await b.run(torch.rand, 9), torch.rand(9)])
            return numbers.tolist()  # type: ignore[no-any-return]

    numbers = await drawn()
    assert len(set(numbers)) == 27
    assert await drawn() == numbers
    assert numbers[:9] == torch.rand(9, generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("where", ["run", "backward"])
async def test_seeds_in_an_operation_of_the_client(executor: symbiosis.Executor, where: str) -> None:
    """With checkpointing, the client's thread draws from the client's stream during a backward pass."""
    drawn: list[torch.Tensor] = []

    async with executor.client(lora(), seed=1) as client:

        def draw() -> None:
            client.manual_seed(5)
            drawn.append(torch.rand(3))
            client.model(input_ids=IDS)  # leaves the stream and enters it again
            drawn.append(torch.rand(3))

        before = torch.get_rng_state()
        if where == "run":
            await client.run(draw)
        else:
            client.model.gradient_checkpointing_enable()
            loss = torch.ones(1, requires_grad=True).sum()
            loss.register_hook(lambda _: draw())
            await client.backward(loss)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.cat(drawn), torch.rand(6, generator=torch.Generator().manual_seed(5)))


async def test_from_threads(executor: symbiosis.Executor, base: Any) -> None:
    """client.model may be called from any thread, beside coroutines that call forward, backward and generate. Backward
    passes wait on that thread, and not on the one that the autograd engine has for a GPU."""
    expected = base(input_ids=IDS).logits
    engine_threads = []

    def in_a_thread(client: symbiosis.Client) -> torch.Tensor:
        output = client.model(**BATCH)
        output.loss.register_hook(lambda _: engine_threads.append(torch._C._is_multithreading_enabled()))
        output.loss.backward()
        client.model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3)
        logits: torch.Tensor = output.logits
        return logits

    async with crowd(executor, [(lora(), "train"), (None, "generate")]):
        async with executor.client(ia3()) as client, executor.client() as bare:
            logits = await asyncio.to_thread(lambda: bare.model(input_ids=IDS).logits)
            torch.testing.assert_close(logits, expected)
            await asyncio.to_thread(in_a_thread, client)
            assert all(p.grad is not None for p in client.model.parameters() if p.requires_grad)
            # Several threads of several clients run at the same time.
            await asyncio.gather(
                asyncio.to_thread(in_a_thread, client),
                *[asyncio.to_thread(lambda: bare.model(input_ids=IDS).logits) for _ in range(1)],
                client.forward(input_ids=IDS),
            )
    assert engine_threads == [False, False]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_from_a_thread_beside_the_clients_own(executor: symbiosis.Executor, cancelled: bool) -> None:
    """The random numbers, and the end, of a backward pass concern the client's own thread alone."""
    loop, outputs = asyncio.get_running_loop(), []

    def evaluate() -> None:
        outputs.append(client.model(input_ids=IDS))

    def call_on() -> None:
        while True:
            client.model(input_ids=IDS)

    def during_backward() -> None:
        if cancelled:
            loop.call_soon_threadsafe(task.cancel)
            with pytest.raises(ClientClosedError, match="was cancelled"):
                call_on()
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        outputs.append(torch.rand(3))

    async with executor.client(lora(), seed=5) as client:
        client.model.gradient_checkpointing_enable()
        client.manual_seed(5)
        loss = torch.ones(1, requires_grad=True).sum()
        loss.register_hook(lambda _: during_backward())
        task = asyncio.create_task(client.backward(loss))
        await asyncio.wait([task])
        assert task.cancelled() if cancelled else task.exception() is None
        output, drawn = outputs
        assert torch.equal(output.logits, (await client.forward(input_ids=IDS)).logits)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


async def test_threads_and_fibers_agree(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        in_fiber = (await client.forward(input_ids=IDS)).logits
        in_thread = (await asyncio.to_thread(client.model, input_ids=IDS)).logits
        assert torch.equal(in_fiber, in_thread)


async def test_a_batch_without_labels(executor: symbiosis.Executor) -> None:
    async with executor.client(lora()) as client:
        with pytest.raises(UsageError, match="no loss for a batch of input_ids; add labels"):
            await client.train_step({"input_ids": IDS}, adamw(client.model))
        with pytest.raises(UsageError, match="; leave return_dict=False out"):
            await client.train_step({**BATCH, "return_dict": False}, adamw(client.model))
        await client.train_step(BATCH, adamw(client.model))


async def test_saving_without_an_adapter(executor: symbiosis.Executor, tmp_path: Any) -> None:
    async with executor.client() as client:
        with pytest.raises(UsageError, match=r"no adapter to save.*peft_config .model.save_pretrained saves"):
            client.save_adapter(tmp_path)
    assert not list(tmp_path.iterdir())


async def test_a_saved_adapter_is_small_and_complete(executor: symbiosis.Executor, tmp_path: Any) -> None:
    """The folder is a standard PEFT folder: it has the configuration and adapter weights, and no weights of the base
    model.
    """
    from safetensors.torch import load_file

    async with executor.client(lora()) as client:
        client.save_adapter(tmp_path / "adapter")
        wanted = {name.replace(".default", "") for name in parameters(client.model)}
    folder = tmp_path / "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    tensors = load_file(folder / "adapter_model.safetensors")
    assert set(tensors) == wanted
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


async def test_a_second_adapter_leaves_modes_as_they_are(executor: symbiosis.Executor) -> None:
    """One layer of each kind is tried when an adapter is added."""
    async with executor.client(lora(lora_dropout=0.5)) as client:
        modules = client.model.train().modules()
        dropouts = [module.eval() for module in modules if isinstance(module, torch.nn.Dropout)]
        client.model.add_adapter("second", lora())
        assert dropouts
        assert not any(dropout.training for dropout in dropouts)


async def _called(fn: Callable[..., object], *args: object) -> None:
    fn(*args)


async def test_an_adapter_is_loaded_between_operations(executor: symbiosis.Executor, tmp_path: Any) -> None:
    """On another thread an operation could begin meanwhile. Within `run`, loading is an operation itself."""
    async with executor.client(lora()) as client:
        parameter = next(parameter for parameter in client.model.parameters() if parameter.requires_grad)
        torch.nn.init.ones_(parameter)
        client.save_adapter(tmp_path)
        torch.nn.init.zeros_(parameter)
        with pytest.raises(UsageError, match=r"on another thread.*`await client\.run\(client\.load_adapter"):
            await asyncio.to_thread(client.load_adapter, tmp_path)
        loading = asyncio.to_thread(
            lambda: asyncio.run(_called(client.load_adapter, tmp_path))
        )  # with a loop of its own
        with pytest.raises(UsageError, match="on another thread"):
            await loading
        assert not parameter.any()
        operation = asyncio.create_task(client.forward(input_ids=IDS))
        await asyncio.sleep(0)
        await client.run(client.load_adapter, tmp_path)
        assert operation.done()
        assert (parameter == 1).all()
        await operation


@pytest.mark.parametrize("what", ["save", "load"])
async def test_adapters_during_an_operation(executor: symbiosis.Executor, tmp_path: Any, what: str) -> None:
    async with executor.client(lora()) as client:
        client.save_adapter(tmp_path)
        task = asyncio.create_task(client.forward(input_ids=IDS))
        await asyncio.sleep(0)
        act = getattr(client, f"{what}_adapter")
        with pytest.raises(UsageError, match="in the middle of an operation"):
            act(tmp_path)
        async with executor.client() as other:
            with pytest.raises(UsageError, match="in the middle of an operation"):
                await other.run(act, tmp_path)
        await task
        act(tmp_path)


async def test_an_operation_may_save_the_adapter_itself(executor: symbiosis.Executor, tmp_path: Any) -> None:
    async with executor.client(lora()) as client:
        await client.run(client.save_adapter, tmp_path / "run")
        optimizer = Mock(step=lambda: client.save_adapter(tmp_path / "step"))  # such as a hook of an optimizer
        await client.train_step({"input_ids": IDS, "labels": IDS}, optimizer)
        assert {folder.name for folder in tmp_path.iterdir()} == {"run", "step"}


async def test_names_and_representation(executor: symbiosis.Executor) -> None:
    first, second = executor.client(), executor.client()
    assert first.name != second.name
    assert "not open yet" in repr(first)
    with pytest.raises(UsageError, match="not open yet"):
        first.load_adapter("nowhere")
    async with executor.client(name="alice") as alice:
        assert repr(alice) == "<Client 'alice': open>"
    assert repr(alice) == "<Client 'alice': closed>"


async def test_a_client_with_a_recorder_thinks_while_it_walks(executor: symbiosis.Executor) -> None:
    """Batches wait for it like for other clients: its walk does not end at each request."""

    class Recorder:
        ends = 0

        def __init__(self, channel: Any) -> None:
            self._channel, self._end_walk = channel, channel.end_walk
            channel.end_walk = self._ending

        def __getattr__(self, name: str) -> Any:
            return getattr(self._channel, name)

        def _ending(self) -> None:
            self.ends += 1
            self._end_walk()

    async with executor.client() as client:
        recorder = client.wrap_channel(Recorder)
        await client.forward(input_ids=IDS)
        assert recorder.ends == 1


async def test_a_client_that_is_not_open_yet(executor: symbiosis.Executor) -> None:
    client = executor.client()
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(UsageError, match="is not open yet"):
        client.wrap_channel(Mock())
    for operation in (client.precompute(), client.backward(loss), client.run(int), client.forward(input_ids=IDS)):
        with pytest.raises(UsageError, match="is not open yet"):
            await operation


async def test_clients_may_share_one_configuration(executor: symbiosis.Executor) -> None:
    """PEFT writes into a PeftConfig object, so clients that are given the same object use copies or equal values."""
    config = lora()
    async with executor.client(config, seed=1) as a, executor.client(config, seed=1) as b:
        one, two = await asyncio.gather(a.forward(input_ids=IDS), b.forward(input_ids=IDS))
        torch.testing.assert_close(one.logits, two.logits)


async def test_client_on_another_device_name(executor: symbiosis.Executor) -> None:
    async with executor.client(lora(), device="cpu") as client:
        assert next(client.model.parameters()).device == torch.device("cpu")
        await client.train_step(BATCH, adamw(client.model))


async def test_a_client_beside_others_uses_half_of_the_cores(executor: symbiosis.Executor) -> None:
    """A client uses all threads that torch has while no other client is under way, and otherwise half of them. That may
    change during a backward pass."""
    seen: list[int] = []

    def look(_: object) -> None:
        seen.append(torch.get_num_threads())

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            look(self)
            super().step(closure)

    torch.set_num_threads(6)
    try:
        async with executor.client(lora(), seed=0) as client, executor.client() as other:
            optimizer = Looking(client.model.parameters(), lr=1e-3)
            await client.train_step(BATCH, optimizer)
            loss = (await client.forward(**BATCH)).loss
            loss.register_hook(look)
            loss.register_hook(lambda _: executor.engine.begin_walk(other.name))
            first = next(parameter for parameter in client.model.parameters() if parameter.requires_grad)
            looking = first.register_hook(look)
            await client.backward(loss)
            looking.remove()
            await client.train_step(BATCH, optimizer)
            executor.engine.end_walk(other.name)
            await client.train_step(BATCH, optimizer)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(1)
    assert seen == [6, 6, 3, 3, 6]


async def test_an_optimizer_step_of_another_client_has_half_of_the_cores(executor: symbiosis.Executor) -> None:
    seen: list[int] = []
    begun, looked = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            begun.set()
            assert looked.wait(30)

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(torch.get_num_threads())
            looked.set()

    torch.set_num_threads(6)
    try:
        async with executor.client(lora()) as one, executor.client(lora()) as other:
            step = asyncio.create_task(one.train_step(BATCH, Waiting(one.model.parameters(), lr=1e-3)))
            assert await asyncio.to_thread(begun.wait, 30)
            await other.train_step(BATCH, Looking(other.model.parameters(), lr=1e-3))
            await step
    finally:
        torch.set_num_threads(1)
    assert seen == [3]


async def test_a_close_that_is_cancelled_goes_on(executor: symbiosis.Executor) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            begun.set()
            assert goes_on.wait(30)

    client = await executor.client(lora()).open()
    step = asyncio.create_task(client.train_step(BATCH, Waiting(client.model.parameters(), lr=1e-3)))
    assert await asyncio.to_thread(begun.wait, 30)

    async def close() -> None:
        with torch.inference_mode():
            await client.close()

    closing = asyncio.create_task(close())
    await asyncio.sleep(0)
    assert torch.is_grad_enabled(), "modes of the caller are not those of others"
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    goes_on.set()
    await asyncio.gather(step, return_exceptions=True)
    await until(lambda: client._thread._pool is None)
    assert torch.is_grad_enabled()
    await client.close()


async def test_stop_iteration_on_the_clients_own_thread_is_a_runtime_error(executor: symbiosis.Executor) -> None:
    def exhausted(*_: object) -> None:
        next(iter(()))

    async with asyncio.timeout(30), executor.client(lora(), name="ann") as client:
        loss = (await client.forward(**BATCH)).loss
        loss.register_hook(exhausted)
        with pytest.raises(RuntimeError, match="an operation of client 'ann' raised StopIteration"):
            await client.backward(loss)
        optimizer = torch.optim.SGD([p for p in client.model.parameters() if p.requires_grad], lr=0.1)
        schedule = optimizer.register_step_pre_hook(exhausted)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await client.train_step(BATCH, optimizer)
        schedule.remove()
        assert await client.train_step(BATCH, optimizer) > 0


async def test_the_clients_own_thread_has_the_callers_context_variables(executor: symbiosis.Executor) -> None:
    request, seen = ContextVar("request", default="none"), []
    async with executor.client(lora()) as client:
        for name in ("one", "two"):
            request.set(name)
            loss = (await client.forward(**BATCH)).loss
            loss.register_hook(lambda _: seen.append(request.get()))
            await client.backward(loss)
    assert seen == ["one", "two"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process in /proc")
async def test_threads_of_a_lone_client_keep_no_helpers(executor: symbiosis.Executor) -> None:
    """While a process has more OpenMP threads than cores, they sleep after each operator, which slows the next down."""
    matrix = torch.ones(400, 400)
    without: set[str] = set()
    seen: list[int] = []

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    class Working(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            matrix @ matrix
            seen.append(len(threads() - without))

    torch.set_num_threads(4)
    try:
        async with executor.client(lora(), seed=0) as client:
            optimizer = Working(client.model.parameters(), lr=1e-3)
            await client.train_step(BATCH, optimizer)
            end_helpers()
            without.update(threads())
            matrix @ matrix
            assert len(threads() - without) == 3, "those of the event loop's thread"
            seen.clear()
            await client.train_step(BATCH, optimizer)
            assert seen == [3], "those of the client's thread alone"
            assert threads() <= without
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("base_layers", ["linear", pytest.param("mlp", marks=pytest.mark.thorough)])
async def test_compiled_code_calls_layers_uncompiled(base: Any, base_layers: str) -> None:
    compile_config = CompileConfig(backend="eager")
    compile_config._compile_all_devices = True
    torch.compiler.reset()
    async with (
        symbiosis.Executor(base, base_layers=base_layers) as executor,
        executor.client(lora()) as one,
        executor.client() as other,
    ):
        options = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False}
        expected = [await client.generate(**options) for client in (one, other)]
        torch._dynamo.utils.counters.clear()
        assert torch.equal(
            await one.generate(**options, cache_implementation="static", compile_config=compile_config), expected[0]
        )
        assert not torch._dynamo.utils.counters["stats"], "generate compiles only if it is asked to"
        static = one.generate(
            **options, cache_implementation="static", compile_config=compile_config, disable_compile=False
        )
        results = await asyncio.wait_for(asyncio.gather(static, other.generate(**options)), 60)
        assert all(map(torch.equal, results, expected))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("window", [None, 4])
async def test_the_loss_is_read_on_the_clients_own_thread(
    executor: symbiosis.Executor, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the thread that reads the loss waits until the backward pass has run."""
    threads = set()
    item = torch.Tensor.item

    def noted(tensor: torch.Tensor) -> Any:
        threads.add(threading.get_ident())
        return item(tensor)

    async with executor.client(lora()) as client:
        optimizer = adamw(client.model)
        monkeypatch.setattr(torch.Tensor, "item", noted)
        await client.train_step(BATCH, optimizer, window=window)
    assert threads
    assert threading.get_ident() not in threads


async def test_generate_leaves_dropout_off_where_the_tenant_has_frozen_it(executor: symbiosis.Executor) -> None:
    async with executor.client(lora(lora_dropout=0.5)) as client:
        client.model.train()
        dropouts = [module for module in client.model.modules() if isinstance(module, torch.nn.Dropout)]
        for dropout in dropouts:
            dropout.eval()
        await client.generate(input_ids=IDS, max_new_tokens=2)
        assert client.model.training
        assert not any(dropout.training for dropout in dropouts)


@pytest.mark.parametrize("method", ["lora", "prefix"])
async def test_an_adapter_loaded_for_comparison_leaves_trainable_what_was(
    executor: symbiosis.Executor, tmp_path: Path, method: str
) -> None:
    """The tenant goes on with its own adapter, a norm that it has unfrozen, and a module whose dropout it has frozen. A
    prefix that is loaded freezes norms in plain PEFT too."""
    config = METHODS[method]("llama")
    async with executor.client(copy.deepcopy(config)) as other:
        other.save_adapter(tmp_path)
    async with executor.client(copy.deepcopy(config)) as client:
        model = client.model
        norm = next(parameter for name, parameter in model.named_parameters() if name.endswith("model.norm.weight"))
        norm.requires_grad_(method == "lora")
        frozen = next(module for module in model.train().modules() if not list(module.children())).eval()
        before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        client.load_adapter(tmp_path, name="other")
        model.set_adapter("default")
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == before
        assert model.training
        assert not frozen.training
        await client.train_step(BATCH, adamw(model))
        client.load_adapter(tmp_path)  # in place of its own, which is then not trainable
        assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".default." in name)


@pytest.mark.parametrize("config", [None, lora()], ids=["bare", "lora"])
@pytest.mark.parametrize("what", ["client", "connection"])
async def test_a_client_that_is_closed_while_it_opens_leaves(base: Any, tmp_path: Path, config: Any, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(listener.address) as served:
            client = served.client(config)
            opening = asyncio.create_task(client.open())
            await asyncio.sleep(0)  # it has begun
            await (client if what == "client" else served).close()
            with pytest.raises(ClientClosedError, match="is closed"):
                await opening
            await until(lambda: not executor.status()["clients"])


async def test_a_client_is_opened_once(base: Any, tmp_path: Path) -> None:
    """Also where the first ``open`` has not returned yet. One that fails can be repeated."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        served = symbiosis.connect(listener.address)
        client = served.client()
        with pytest.raises(ExecutorClosedError, match="is not open"):
            await client.open()
        async with served:
            _, second = await asyncio.gather(client.open(), client.open(), return_exceptions=True)
            assert isinstance(second, UsageError)
            with pytest.raises(UsageError, match="was opened before"):
                await client.open()
            assert list(executor.status()["clients"]) == [client.name]


async def test_closed_clients_of_a_connection_are_forgotten(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symbiosis.client.connect._MAX_CLIENTS", 3)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(listener.address) as served:
            models = []
            for number in range(5):
                async with served.client(lora(), name=f"client-{number}") as client:
                    await client.generate(input_ids=IDS[:1], max_new_tokens=2)
                    models.append(weakref.ref(client.model))
                del client
            gc.collect()
            assert sum(model() is not None for model in models) <= 1
            assert list(served.walks()) == ["client-2", "client-3", "client-4"]


async def test_a_model_whose_forward_was_compiled() -> None:
    """The compiled function calls the executor's own model, so a client walks its copy without it."""
    model, config = tiny_model(), lora(init_lora_weights=False)
    torch.manual_seed(0)
    expected = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).eval()(input_ids=IDS).logits
    model.forward = torch.compile(model.forward, backend="eager")
    async with symbiosis.Executor(model) as executor, executor.client(config, seed=0) as client:
        assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)
        assert executor.statistics().requests


def test_a_model_whose_forward_was_replaced_by_a_function() -> None:
    """It would call the layers of the executor's model in each client, without the client's adapter."""
    model = tiny_model()
    block = model.model.layers[1]
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(
        SplitError, match=r"forward of model\.layers\.1 \(LlamaDecoderLayer\) was replaced by a function"
    ):
        symbiosis.Executor(model)


async def test_a_thread_while_another_model_is_compiled(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says on all threads that it compiles."""
    expected = base(input_ids=IDS).logits
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        logits = (await client.run(torch.no_grad()(client.model), input_ids=IDS)).logits
    assert torch.equal(logits, expected)


async def test_a_model_that_a_tenant_puts_around_the_clients(executor: symbiosis.Executor, base: Any) -> None:
    """The client's own operations use its own model, which has no prompt. `run` calls the tenant's."""
    options = {"input_ids": IDS, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    torch.manual_seed(0)
    plain = peft.get_peft_model(copy.deepcopy(base), prefix())
    expected = plain.eval().generate(**options)
    async with executor.client() as client:
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(client.model, prefix())
        assert torch.equal(await client.run(wrapped.eval().generate, **options), expected)
        assert torch.equal(await client.generate(**options), base.generate(**options))
