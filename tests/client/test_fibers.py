"""Fibers run synchronous code that suspends. Torch's modes and random numbers belong to the fiber that set them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from symbiosis.client.fibers import RandomStream, current_fiber, run_in_fiber

CPU = torch.device("cpu")


def wait(awaitable: Any) -> Any:
    fiber = current_fiber()
    assert fiber is not None
    return fiber.wait(awaitable)


class Nowhere:
    """A channel that counts its flushes and does nothing else."""

    def __init__(self, flush: Callable[[], None] = lambda: None) -> None:
        self.flush = flush

    def begin_walk(self) -> None: ...
    def end_walk(self) -> None: ...


async def run(fn: Callable[..., Any], *args: Any) -> Any:
    return await run_in_fiber(RandomStream(CPU), Nowhere(), fn, *args)


async def soon(value: Any = None) -> Any:
    await asyncio.sleep(0)
    return value


async def test_returns_results() -> None:
    def work(x: int) -> int:
        return wait(soon(x)) + wait(soon(1))  # type: ignore[no-any-return]

    assert await run(work, 3) == 4
    assert current_fiber() is None


async def test_raises_what_the_function_raises() -> None:
    def work() -> None:
        wait(soon())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(work)


async def test_raises_in_the_function_what_the_awaitable_raises() -> None:
    async def fail() -> None:
        raise KeyError("gone")

    def work() -> str:
        with contextlib.suppress(KeyError):
            wait(fail())
        return "caught"

    assert await run(work) == "caught"


async def test_flushes_whenever_it_suspends() -> None:
    count = 0

    def flush() -> None:
        nonlocal count
        assert current_fiber() is None
        count += 1

    await run_in_fiber(RandomStream(CPU), Nowhere(flush), lambda: [wait(soon()) for _ in range(3)])
    assert count == 3


async def test_cancellation_is_raised_inside_the_wait() -> None:
    seen: list[str] = []

    def work() -> None:
        try:
            wait(asyncio.sleep(60))
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            seen.append("cleaned up")

    task = asyncio.create_task(run(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "cleaned up"]


async def test_fibers_are_interleaved() -> None:
    order: list[tuple[int, int]] = []

    def work(number: int) -> int:
        for step in range(3):
            order.append((step, number))
            wait(soon())
        return number

    assert await asyncio.gather(*[run(work, number) for number in range(4)]) == [0, 1, 2, 3]
    assert order == sorted(order)


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountingDispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def saved_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x + 0, lambda x: x)


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.ones(2, 2).mm(torch.ones(2, 2)).dtype),
    ),
    "autocast-disabled-inside": (
        lambda: nested(torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast-dtype": (lambda: torch.autocast("cpu", torch.float16), lambda: torch.get_autocast_dtype("cpu")),
    "autocast-cache": (lambda: torch.autocast("cpu", cache_enabled=False), torch.is_autocast_cache_enabled),
    "autocast-nesting": (
        lambda: nested(torch.autocast("cpu"), torch.autocast("cpu", enabled=False)),
        lambda: (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1],
    ),
    "saved_tensors_hooks": (
        saved_hooks,
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    ),
    "function-mode": (CountingFunctions, torch._C._len_torch_function_stack),
    "dispatch-mode": (CountingDispatches, torch._C._len_torch_dispatch_stack),
    "nested": (lambda: nested(torch.no_grad(), torch.enable_grad(), torch.inference_mode()), torch.is_grad_enabled),
}


@contextlib.contextmanager
def nested(*contexts: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@pytest.mark.parametrize("mode", MODES)
async def test_modes_follow_their_fiber(mode: str) -> None:
    """One fiber suspends inside a mode. The loop and another fiber never observe it, and the first resumes in it."""
    enter, observe = MODES[mode]
    outside = observe()
    seen: list[Any] = []

    def inside() -> None:
        assert observe() == outside
        with enter():
            before = observe()
            for _ in range(4):
                wait(soon())
                assert observe() == before
        assert observe() == outside
        wait(soon())
        assert observe() == outside

    def beside() -> None:
        for _ in range(6):
            seen.append(observe())
            wait(soon())

    async def loop() -> None:
        for _ in range(6):
            seen.append(observe())
            await asyncio.sleep(0)

    await asyncio.gather(run(inside), run(beside), run(inside), loop())
    assert len(seen) == 12
    assert all(value == outside for value in seen), seen


@pytest.mark.parametrize("how", ["error", "cancel"])
@pytest.mark.parametrize("mode", MODES)
async def test_modes_end_with_their_fiber(mode: str, how: str) -> None:
    enter, observe = MODES[mode]
    outside = observe()

    def work() -> None:
        with enter():
            wait(soon())
            if how == "error":
                raise ZeroDivisionError
            wait(asyncio.sleep(60))

    task = asyncio.create_task(run(work))
    for _ in range(4):
        await asyncio.sleep(0)
        assert observe() == outside
    task.cancel()
    with pytest.raises(ZeroDivisionError if how == "error" else asyncio.CancelledError):
        await task
    assert observe() == outside


async def test_hooks_still_pack_after_a_suspension() -> None:
    packed: list[torch.Tensor] = []

    def work() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            x.exp()
            wait(soon())
            x.exp()
        x.exp()

    def beside() -> None:
        for _ in range(3):
            torch.ones(2, requires_grad=True).exp()
            wait(soon())

    await asyncio.gather(run(work), run(beside))
    assert len(packed) == 2


async def test_each_stream_is_a_process_of_its_own() -> None:
    """Interleaved fibers, and the loop, draw the numbers that each of them would draw alone."""

    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        numbers = []
        for _ in range(4):
            numbers.append(torch.rand(()).item())
            wait(soon())
        return numbers

    def alone(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand((), generator=generator).item() for _ in range(4)]

    torch.manual_seed(99)

    async def loop() -> list[float]:
        numbers = []
        for _ in range(4):
            numbers.append(torch.rand(()).item())
            await asyncio.sleep(0)
        return numbers

    results = await asyncio.gather(*[run(draw, seed) for seed in range(3)], loop())
    assert results == [*(alone(seed) for seed in range(3)), alone(99)]


async def test_a_stream_continues_in_the_next_fiber() -> None:
    stream = RandomStream(CPU)

    def draw() -> float:
        return torch.rand(()).item()

    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(3)]
    await run_in_fiber(stream, Nowhere(), torch.manual_seed, 5)
    assert [await run_in_fiber(stream, Nowhere(), draw) for _ in range(3)] == expected


def test_a_stream_starts_as_torchs_own_while_a_thread_draws_from_another() -> None:
    torch.manual_seed(7)
    with RandomStream(CPU):
        expected = torch.rand(3)
    entered, leave = threading.Event(), threading.Event()

    def draw() -> None:
        with RandomStream(CPU):
            torch.rand(3)
            entered.set()
            leave.wait(0.2)  # the lock makes the stream below wait for that long

    thread = threading.Thread(target=draw)
    thread.start()
    entered.wait()
    stream = RandomStream(CPU)
    leave.set()
    thread.join()
    with stream:
        assert torch.equal(torch.rand(3), expected)


async def test_context_variables_are_copied_in() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("outside")

    def work() -> str:
        before = variable.get()
        variable.set("inside")
        wait(soon())
        assert variable.get() == "inside"
        return before

    assert await run(work) == "outside"
    assert variable.get() == "outside"


async def test_a_fiber_keeps_no_result_that_its_code_released() -> None:
    """The result of an await is freed as soon as the code in the fiber releases it."""

    async def make() -> torch.Tensor:
        tensor = torch.ones(1000)
        refs.append(weakref.ref(tensor))
        return tensor

    refs: list[weakref.ref[torch.Tensor]] = []

    def work() -> list[bool]:
        for _ in range(3):
            wait(make())
        return [ref() is not None for ref in refs]

    assert await run(work) == [False, False, False]


async def test_an_abandoned_fiber_cleans_up() -> None:
    """Closing a coroutine before its end unwinds the function."""
    cleaned: list[bool] = []

    def work() -> None:
        try:
            with torch.no_grad():
                wait(asyncio.get_running_loop().create_future())
        finally:
            cleaned.append(torch.is_grad_enabled())

    coroutine = run(work)
    coroutine.send(None)
    coroutine.close()
    gc.collect()
    assert cleaned == [True]
    assert torch.is_grad_enabled()
