"""What all tests share: Hypothesis settings, small models, and the check that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import copy
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from symbiosis.testing import tiny_model
from tests.helpers import PROFILE, examples

for name in ("fast", "thorough"):
    settings.register_profile(
        name,
        max_examples=examples(100, profile=name),
        derandomize=True,  # the same examples everywhere; a failure is printed as code that reproduces it
        database=None,
        deadline=None,  # the machine is shared
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(PROFILE)

# Where a shell began the tests in the background, they and the processes that they start would not hear a Ctrl-C.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # the models are tiny; a second thread costs more than it brings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests: at the end, one of them would keep one worker busy while the others have nothing."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def _base() -> Any:
    return tiny_model("llama")


@pytest.fixture
def base(_base: Any) -> Any:
    """A tiny Llama of this test's own."""
    return copy.deepcopy(_base)


@pytest.fixture
async def _nothing_left_on_the_loop() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: complaints.append(context))
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    assert not left, f"tasks left behind: {left}"
    assert not complaints, f"the event loop was told of {complaints}"


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("symbiosis-")]


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No task, no client's thread, no torch mode outlives a test, and the event loop reported no error."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_nothing_left_on_the_loop")
    yield
    for thread in threading.enumerate():
        if thread.name == "symbiosis-dist":  # it ends by itself, soon
            thread.join(40)
    assert not client_threads(), f"threads left behind: {client_threads()}"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
