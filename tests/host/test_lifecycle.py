"""Clients join, leave, fail and are cancelled at any moment. Other clients are not affected, and no state is left
behind.

A client can be between operations, in a fiber with queued or running rows, in backward on its thread, in a plain
thread, or waiting for its previous operation. Each test ends with the executor still serving the right numbers, and the
fixture in ``conftest.py`` looks for tasks and threads left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch

import symbiosis
from symbiosis.core.requests import Key, Pass
from symbiosis.errors import ClientClosedError, ExecutorClosedError, LayerError, UsageError
from symbiosis.executor import engine, runner
from symbiosis.testing import Job, run_job, run_job_plain
from tests.conftest import client_threads
from tests.helpers import BATCH, IDS, adamw, assert_close, crowd, ia3, lora, parameters, prefix


class Gate:
    """Stop an executor's layer at its n-th batch, so that a test can act while requests are queued or running.

    ``during`` is called inside that batch, on the loop, like another task during the batch of a slow base layer.
    """

    def __init__(
        self, executor: symbiosis.Executor, layer: int, pass_: Pass, during: Callable[[], object], nth: int = 1
    ):
        base = executor.engine.layers[layer]
        run = base.run
        self.count = 0

        def gated(key: Key, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
            if key.pass_ is pass_:
                self.count += 1
                if self.count == nth:
                    during()
            return run(key, tensors)

        base.run = gated  # type: ignore[method-assign]


async def assert_serves(executor: symbiosis.Executor, expected: torch.Tensor) -> None:
    async with executor.client() as client:
        assert torch.allclose((await client.forward(input_ids=IDS)).logits, expected, rtol=0, atol=1e-6)
        assert executor.engine.scheduler.outstanding == 0
    assert not executor.engine.calls
    executor.engine.scheduler.validate()


@pytest.fixture
def expected(base: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = copy.deepcopy(base)(input_ids=IDS).logits
    return logits


OPERATIONS: dict[str, Callable[[symbiosis.Client], Awaitable[Any]]] = {}


def operation(fn: Callable[[symbiosis.Client], Awaitable[Any]]) -> Callable[[symbiosis.Client], Awaitable[Any]]:
    OPERATIONS[fn.__name__] = fn
    return fn


@operation
async def forward(client: symbiosis.Client) -> None:
    while True:
        await client.forward(input_ids=IDS)


@operation
async def generate(client: symbiosis.Client) -> None:
    while True:
        await client.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=20, min_new_tokens=20)


@operation
async def backward(client: symbiosis.Client) -> None:
    while True:
        output = await client.forward(**BATCH)
        await client.backward(output.loss)


@operation
async def train(client: symbiosis.Client) -> None:
    optimizer = adamw(client.model)
    while True:
        await client.train_step(BATCH, optimizer)


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("what", OPERATIONS)
async def test_cancelled_at_any_moment(base: Any, expected: torch.Tensor, what: str, moment: int) -> None:
    """Cancel after a number of turns of the loop. The client, and another tenant in the same batches, continue."""
    async with symbiosis.Executor(base) as executor, executor.client() as neighbour:
        async with executor.client(lora(), seed=1) as client:
            before = (await client.forward(input_ids=IDS)).logits
            task = asyncio.create_task(OPERATIONS[what](client))
            beside = asyncio.create_task(neighbour.forward(input_ids=IDS))
            for _ in range(7 * moment):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert torch.allclose((await beside).logits, expected, rtol=0, atol=1e-6)
            client.model.eval()
            if what != "train":
                assert torch.equal((await client.forward(input_ids=IDS)).logits, before)
            await client.train_step(BATCH, adamw(client.model))
        await assert_serves(executor, expected)


@pytest.mark.parametrize("how", ["cancel", "timeout", "taskgroup"])
@pytest.mark.parametrize("what", OPERATIONS)
async def test_cancellation_as_asyncio_does_it(base: Any, expected: torch.Tensor, what: str, how: str) -> None:
    """task.cancel(), asyncio.timeout() and a failing TaskGroup all end an operation in any state."""
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        if how == "cancel":
            task = asyncio.create_task(OPERATIONS[what](client))
            await asyncio.sleep(0.02)
            task.cancel("stop")
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await OPERATIONS[what](client)
        else:

            async def group_that_fails() -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(OPERATIONS[what](client))
                    await asyncio.sleep(0.02)
                    raise ZeroDivisionError

            with pytest.raises(ExceptionGroup) as caught:
                await group_that_fails()
            assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
        await assert_serves(executor, expected)


async def test_other_tenants_are_unaffected_by_cancellations(base: Any) -> None:
    """Four tenants are cancelled repeatedly at random moments. Two others train and end with the plain adapters."""
    job = Job(steps=8, new_tokens=4)
    jobs = [(lora(), 1), (ia3(), 2)]
    plain = [run_job_plain(base, config, job, seed=seed) for config, seed in jobs]
    stop = asyncio.Event()
    generator = torch.Generator().manual_seed(0)

    async def unlucky(number: int) -> None:
        what = list(OPERATIONS.values())[number % len(OPERATIONS)]
        config = [lora(), ia3(), prefix(), lora()][number % 4]
        while not stop.is_set():
            async with executor.client(copy.deepcopy(config)) as client:
                for _ in range(3):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(what(client), 0.03 * torch.rand((), generator=generator).item())

    async def watched(config: Any, seed: int) -> Any:
        async with executor.client(config, seed=seed) as client:
            return await run_job(client, job)

    async with symbiosis.Executor(base) as executor:
        tasks = [asyncio.create_task(unlucky(number)) for number in range(4)]
        outcomes = await asyncio.gather(*[watched(*job) for job in jobs])
        stop.set()
        await asyncio.gather(*tasks)
        assert executor.engine.scheduler.outstanding == 0
        executor.engine.scheduler.validate()
    for outcome, expected in zip(outcomes, plain, strict=True):
        assert_close(outcome, expected)


@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.BACKWARD])
@pytest.mark.parametrize("act", ["cancel", "close"])
async def test_rows_in_a_running_batch(base: Any, expected: torch.Tensor, act: str, pass_: Pass) -> None:
    """A client is cancelled or closed while a batch with some of its rows runs and its other rows are queued."""
    async with symbiosis.Executor(base, max_rows=4) as executor:
        victim = executor.client(lora(), name="victim")
        await victim.open()
        loop = asyncio.get_running_loop()
        closing: list[asyncio.Task[None]] = []

        def during() -> None:
            if act == "cancel":
                loop.call_soon(task.cancel)
            else:
                closing.append(asyncio.ensure_future(victim.close()))

        Gate(executor, 8, pass_, during)
        task = asyncio.create_task(train(victim))
        with pytest.raises(asyncio.CancelledError if act == "cancel" else ClientClosedError):
            await task
        await asyncio.gather(*closing)
        await victim.close()
        await assert_serves(executor, expected)


@pytest.mark.parametrize("stage", ["forward", "backward"])
async def test_tenant_code_that_fails(base: Any, expected: torch.Tensor, stage: str) -> None:
    """An exception from the tenant's own code is raised by the operation. This client and all others continue."""

    class ImpatienceError(Exception):
        pass

    def explode(*args: Any) -> None:
        raise ImpatienceError(stage)

    async with symbiosis.Executor(base) as executor, crowd(executor, [(ia3(), "train"), (None, "generate")]):
        async with executor.client(lora()) as client:
            module = client.model.get_submodule("base_model.model.model.layers.1")
            if stage == "forward":
                handle = module.register_forward_hook(explode)
                with pytest.raises(ImpatienceError):
                    await client.forward(input_ids=IDS)
            else:
                handle = module.register_full_backward_hook(explode)
                output = await client.forward(**BATCH)
                with pytest.raises(ImpatienceError):
                    await client.backward(output.loss)
                del output
            handle.remove()
            await client.train_step(BATCH, adamw(client.model))
    async with symbiosis.Executor(base) as executor:
        await assert_serves(executor, expected)


@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.BACKWARD])
async def test_base_layer_that_fails(base: Any, expected: torch.Tensor, pass_: Pass) -> None:
    """The batch fails with LayerError, its cause and the name of the layer. The next batch is served."""

    def explode() -> None:
        raise MemoryError("no room for this batch")

    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client, executor.client() as other:
        await other.forward(input_ids=IDS)
        Gate(executor, 8, pass_, explode)
        with pytest.raises(LayerError, match=r"model\.layers\.1\.self_attn.* rows.*no room for this batch") as caught:
            await client.train_step(BATCH, adamw(client.model))
        assert isinstance(caught.value.__cause__, MemoryError)
        assert torch.equal((await other.forward(input_ids=IDS)).logits, expected)
        await client.train_step(BATCH, adamw(client.model))
        await assert_serves(executor, expected)


@pytest.mark.parametrize("clients", [1, 2])
async def test_no_tenant_reaches_the_rows_of_another_tenant_through_an_error(base: Any, clients: int) -> None:
    """The frames of a failed batch hold the rows of all its tenants, and no exception that a tenant gets refers to
    these frames. Each tenant gets an exception of its own.
    """

    def explode() -> None:
        try:
            raise OSError("first")
        except OSError as error:
            raise MemoryError("then") from error

    async with symbiosis.Executor(base, policy="lockstep") as executor, contextlib.AsyncExitStack() as stack:
        tenants = [await stack.enter_async_context(executor.client()) for _ in range(clients)]
        Gate(executor, 8, Pass.FORWARD, explode)
        caught = await asyncio.gather(*(one.forward(input_ids=IDS) for one in tenants), return_exceptions=True)
    assert len({id(error) for error in caught}) == clients
    for failed in caught:
        assert isinstance(failed, LayerError)
        assert isinstance(failed.__cause__, MemoryError)
        frames = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(failed.__traceback__)}
        assert not frames & {engine.__file__, runner.__file__}
        error: BaseException | None = failed.__cause__
        while error is not None:
            assert error.__traceback__ is None, error
            error = error.__cause__ or error.__context__


async def test_base_layer_that_fails_in_slices(base: Any, expected: torch.Tensor) -> None:
    """The second of several slices fails: the request gets one error, and the remaining slices are dropped."""

    def explode() -> None:
        raise RuntimeError("bad memory")

    async with symbiosis.Executor(base, max_rows=4) as executor:
        gate = Gate(executor, 7, Pass.FORWARD, explode, nth=2)
        async with executor.client() as client:
            with pytest.raises(LayerError, match="bad memory"):
                await client.forward(input_ids=IDS)
            assert gate.count == 2
        await assert_serves(executor, expected)


@pytest.mark.parametrize("what", OPERATIONS)
async def test_executor_shut_down_during_operations(base: Any, what: str) -> None:
    """Every waiting operation, in a fiber or on a thread, raises ExecutorClosedError, and so does every later call at
    once. Each error is an object of its own: a traceback keeps frames of its client alive, and grows if it is raised
    again.
    """
    async with symbiosis.Executor(base, name="soon-gone") as executor:
        clients = [await executor.client(lora()).open() for _ in range(3)]
        tasks = [asyncio.create_task(OPERATIONS[what](client)) for client in clients]
        await asyncio.sleep(0.03)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    for result in results:
        assert isinstance(result, ExecutorClosedError), result
        assert "inproc://soon-gone was shut down" in str(result)
    for client in clients:
        for _ in range(2):
            with pytest.raises(ExecutorClosedError) as caught:
                await client.forward(input_ids=IDS)
            results.append(caught.value)
        await client.close()
    assert len({id(result) for result in results}) == 9


@pytest.mark.usefixtures("stops_late")
async def test_executor_shut_down_while_backward_waits(base: Any) -> None:
    """The backward thread is certainly blocked: its batch waits for a client that never makes a request."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        client = await executor.client(lora()).open()
        sleeper = await executor.client().open()
        output = await client.forward(**BATCH)
        assert sleeper._channel is not None
        sleeper._channel.begin_walk()  # this client never makes a request
        task = asyncio.create_task(client.backward(output.loss))
        await until(lambda: executor.engine.scheduler.outstanding == 1)
        assert client_threads()
    with pytest.raises(ExecutorClosedError, match="shut down"):
        await asyncio.wait_for(task, 10)
    await client.close()
    await sleeper.close()


@pytest.mark.usefixtures("stops_late")
@pytest.mark.parametrize("by", ["executor", "client"])
async def test_a_call_on_a_plain_thread_ends_with_an_error(base: Any, by: str) -> None:
    """asyncio.to_thread(model) raises a clear error when the executor or the client is closed."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        client = await executor.client(lora()).open()
        sleeper = await executor.client().open()
        assert sleeper._channel is not None
        sleeper._channel.begin_walk()
        task = asyncio.create_task(asyncio.to_thread(client.model, input_ids=IDS))
        await until(lambda: executor.engine.scheduler.outstanding == 1)
        if by == "client":
            await client.close()
            with pytest.raises(ClientClosedError, match=client.name):
                await asyncio.wait_for(task, 10)
    if by == "executor":
        with pytest.raises(ExecutorClosedError, match="shut down"):
            await asyncio.wait_for(task, 10)
        await client.close()
    await sleeper.close()


@pytest.mark.parametrize("what", OPERATIONS)
async def test_client_closed_during_operations(base: Any, expected: torch.Tensor, what: str) -> None:
    async with symbiosis.Executor(base) as executor:
        client = await executor.client(lora(), name="brief").open()
        task = asyncio.create_task(OPERATIONS[what](client))
        await asyncio.sleep(0.02)
        queued = asyncio.create_task(client.forward(input_ids=IDS))  # waits for the previous operation
        await asyncio.sleep(0)
        await asyncio.wait_for(client.close(), 10)
        for waiting in (task, queued):
            with pytest.raises(ClientClosedError, match="closed"):
                await asyncio.wait_for(waiting, 10)
        await assert_serves(executor, expected)


@pytest.mark.usefixtures("stops_late")
async def test_cancelled_during_close(base: Any, expected: torch.Tensor) -> None:
    """After close() and cancel() at the same time, the cancellation is raised and the thread ends."""
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        client = await executor.client(lora()).open()
        sleeper = await executor.client().open()
        output = await client.forward(**BATCH)
        assert sleeper._channel is not None
        sleeper._channel.begin_walk()
        task = asyncio.create_task(client.backward(output.loss))
        await until(lambda: executor.engine.scheduler.outstanding == 1)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, ClientClosedError)):
            await asyncio.wait_for(asyncio.shield(task), 10)
        assert task.cancelled()
        await asyncio.wait_for(closing, 10)
        await sleeper.close()
        await assert_serves(executor, expected)


async def test_close_itself_cancelled(base: Any) -> None:
    """Cancelling close() does not leak the client's thread: the next close() ends it."""
    async with symbiosis.Executor(base) as executor:
        client = await executor.client(lora()).open()
        await client.train_step(BATCH, adamw(client.model))
        assert client_threads()
        blocker = asyncio.Event()
        hold = asyncio.create_task(hold_turn(client, blocker))
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        blocker.set()
        await hold
        await client.close()
        assert not client_threads()


async def hold_turn(client: symbiosis.Client, release: asyncio.Event) -> None:
    async with client._turn:
        await release.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.001)


async def test_cancelled_between_operations(base: Any, expected: torch.Tensor) -> None:
    """A task that holds a graph is cancelled between forward and backward."""
    async with symbiosis.Executor(base) as executor:

        async def job() -> None:
            async with executor.client(lora()) as client:
                output = await client.forward(**BATCH)
                reached.set()
                await asyncio.sleep(60)
                await client.backward(output.loss)

        reached = asyncio.Event()
        task = asyncio.create_task(job())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not executor.service.clients
        await assert_serves(executor, expected)


@pytest.mark.usefixtures("stops_late")
async def test_cancelled_train_step_changes_nothing(base: Any) -> None:
    """A step that is cancelled during backward leaves the adapter unchanged."""
    async with symbiosis.Executor(base, policy="lockstep") as executor, executor.client(lora()) as client:
        sleeper = await executor.client().open()
        assert sleeper._channel is not None
        optimizer = adamw(client.model)
        before = parameters(client.model)
        in_pass_on_thread = client._in_walk_on_thread

        async def held_up(*args: Any, **kwargs: Any) -> None:
            sleeper._channel.begin_walk()
            await in_pass_on_thread(*args, **kwargs)

        client._in_walk_on_thread = held_up  # type: ignore[method-assign]
        task = asyncio.create_task(client.train_step(BATCH, optimizer))
        await until(lambda: task.done() or executor.engine.scheduler.outstanding == 1)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.engine.scheduler.outstanding == 0  # its request was removed with it
        for name, value in parameters(client.model).items():
            assert torch.equal(value, before[name]), name
        await sleeper.close()


async def test_a_cancelled_client_is_not_waited_for(base: Any) -> None:
    """Under lockstep, a cancelled, failed or closed client must not delay the others."""
    async with symbiosis.Executor(base, policy="lockstep") as executor, executor.client(lora()) as client:

        def fails() -> None:
            client.model(input_ids=IDS)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await client.run(fails)
        task = asyncio.create_task(generate(client))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert executor.engine.scheduler.thinking == 0
        async with executor.client() as other:
            await asyncio.wait_for(other.forward(input_ids=IDS), 10)


async def test_a_tenant_that_ignores_cancellation(base: Any, expected: torch.Tensor) -> None:
    """Code that catches CancelledError and sends another request is served, and no operation hangs."""

    def stubborn(model: Any) -> torch.Tensor:
        try:
            while True:
                model(input_ids=IDS)
        except asyncio.CancelledError:
            logits: torch.Tensor = model(input_ids=IDS).logits
            return logits

    async with symbiosis.Executor(base) as executor, executor.client() as client:
        task = asyncio.create_task(client.run(stubborn, client.model))
        await asyncio.sleep(0.01)
        task.cancel()
        assert torch.equal(await task, expected)
        await assert_serves(executor, expected)


async def test_operations_of_one_client_run_in_order(base: Any) -> None:
    """Operations that are started together run one after another, in the order of their start."""
    order: list[int] = []

    def work(number: int) -> None:
        client.model(input_ids=IDS)
        order.append(number)

    async with symbiosis.Executor(base) as executor, executor.client() as client:
        await asyncio.gather(*[client.run(work, number) for number in range(5)])
    assert order == list(range(5))


@pytest.mark.usefixtures("stops_late")
async def test_clients_of_different_speed(base: Any) -> None:
    """A tenant that thinks for long in the middle of a walk does not delay a fast one (opportunistic batching)."""
    async with symbiosis.Executor(base, policy="opportunistic:wait_ms=1,max_wait_ms=5") as executor:
        async with executor.client() as slow, executor.client() as fast:

            async def think() -> None:
                assert slow._channel is not None
                slow._channel.begin_walk()
                await asyncio.sleep(60)

            thinker = asyncio.create_task(think())
            await asyncio.sleep(0)
            assert executor.engine.scheduler.thinking == 1
            await asyncio.wait_for(fast.forward(input_ids=IDS), 10)
            assert not thinker.done()
            thinker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await thinker


async def test_many_clients_join_and_leave(base: Any) -> None:
    """After a hundred clients the executor keeps nothing of them but their statistics."""
    async with symbiosis.Executor(base) as executor:
        async with executor.client(lora(), name="first") as client:
            await client.train_step(BATCH, adamw(client.model))
        gc.collect()
        before = len(gc.get_objects())
        for number in range(100):
            async with executor.client(lora(), name=f"tenant-{number}") as client:
                if number % 10 == 0:
                    await client.train_step(BATCH, adamw(client.model))
        del client
        gc.collect()
        assert (len(gc.get_objects()) - before) / 100 < 10
        assert not executor.service.clients
        assert not executor.engine.calls
        assert not executor.engine.scheduler._clients.states
        async with executor.client(name="first"):
            pass


async def test_a_duplicate_name_is_refused_and_the_first_client_is_unaffected(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(name="alice") as alice:
        with pytest.raises(UsageError, match=r"'alice'.*choose another name"):
            await executor.client(name="alice").open()
        await alice.forward(input_ids=IDS)


async def test_a_client_cannot_be_opened_twice(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        client = executor.client(name="again")
        async with client:
            with pytest.raises(UsageError, match="'again' was opened before"):
                await client.open()
            await client.forward(input_ids=IDS)
        with pytest.raises(UsageError, match="'again' was opened before"):
            await client.open()
        await client.close()  # closing twice is allowed


async def test_failed_opening_leaves_nothing(base: Any) -> None:
    """PEFT refuses an adapter: the error is raised, and the name can be used again."""
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(ValueError, match="nowhere"):
            await executor.client(lora(target_modules=["nowhere"]), name="bob").open()
        assert not executor.service.clients
        async with executor.client(name="bob") as bob:
            await bob.forward(input_ids=IDS)


async def test_executor_lifecycle_errors(base: Any) -> None:
    executor = symbiosis.Executor(base, name="mine")
    with pytest.raises(ExecutorClosedError, match="async with executor"):
        await executor.client().open()
    with pytest.raises(UsageError, match="start the executor first"):
        await executor.listen("inproc://elsewhere")
    async with executor:
        with pytest.raises(UsageError, match="started before"):
            await executor.start()
        other = symbiosis.Executor(copy.deepcopy(base), name="mine")
        with pytest.raises(UsageError, match="inproc://mine is in use"):
            await other.start()
        await asyncio.wait_for(other.wait_closed(), 10)  # with its shards, if it has any
    await executor.close()
    with pytest.raises(ExecutorClosedError, match=r"mine.*was shut down"):
        await executor.client().open()
    async with symbiosis.Executor(base, name="mine") as again, again.client() as client:  # the name can be used again
        await client.forward(input_ids=IDS)


async def test_an_address_that_cannot_be_closed(base: Any) -> None:
    """All others are closed, and the executor too."""
    executor = symbiosis.Executor(base, name="mine")
    await executor.start()
    broken, good = await executor.listen("tcp://127.0.0.1:0"), await executor.listen("tcp://127.0.0.1:0")
    close = broken.close
    broken.close = AsyncMock(side_effect=PermissionError("no"))  # type: ignore[method-assign]
    with pytest.raises(PermissionError):
        await executor.close()
    await asyncio.wait_for(executor.wait_closed(), 10)
    await executor.close()  # as at the end of an `async with`
    await close()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(*good.address.removeprefix("tcp://").split(":"))
    async with symbiosis.Executor(base, name="mine"):  # its name is free
        pass


async def test_a_channel_that_cannot_be_closed(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with symbiosis.Executor(base) as executor:
        client = executor.client(lora())
        await client.open()
        await client.train_step(BATCH, adamw(client.model))
        assert client_threads()
        monkeypatch.setattr(client._channel, "close", Mock(side_effect=PermissionError("no")))
        with pytest.raises(PermissionError):
            await client.close()
        assert not client_threads()


def test_closing_after_the_event_loop_has_ended(base: Any) -> None:
    opened: list[Any] = []

    async def begin() -> None:
        executor = symbiosis.Executor(base, name="mine")
        await executor.start()
        client = executor.client(lora())
        await client.open()
        await client.train_step(BATCH, adamw(client.model))
        opened.extend([client, executor])

    async def again() -> None:
        async with symbiosis.Executor(base, name="mine"):
            pass

    asyncio.run(begin())
    for one in opened:
        asyncio.run(one.close())
    assert not client_threads()
    asyncio.run(again())


async def test_statistics_on_another_thread(base: Any) -> None:
    """Clients in the executor's process count their tokens meanwhile."""
    async with symbiosis.Executor(base) as executor:
        names = [f"client-{number}" for number in range(200)]
        done = False

        def look() -> None:
            while not done:
                executor.statistics()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        looking = asyncio.create_task(asyncio.to_thread(look))
        try:
            for _ in range(300):
                for name in names:
                    executor.engine.walked(name, None)
                await asyncio.sleep(0)
        finally:
            done = True
            sys.setswitchinterval(interval)
        await looking


def test_an_error_in_the_body_is_raised_alone(base: Any) -> None:
    """An error of the user's code in ``async with`` is not hidden by errors of the clean-up."""

    async def main() -> None:
        async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
            await client.forward(**BATCH)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert not client_threads()


def test_the_program_may_end_during_operations(base: Any) -> None:
    """asyncio.run cancels the remaining tasks: operations end, without a warning or a remaining thread."""

    async def main() -> None:
        executor = await symbiosis.Executor(base).__aenter__()
        client = await executor.client(lora()).open()
        tasks.append(asyncio.create_task(train_and_close(client)))
        await asyncio.sleep(0.02)

    async def train_and_close(client: symbiosis.Client) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            await train(client)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert not client_threads()
