"""Shared setup of all tests: Hypothesis settings, small models, and the check for leaked tasks, threads and modes."""

from __future__ import annotations

import asyncio
import copy
import inspect
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from symbiosis.testing import tiny_model
from symbiosis.transports.joining import ANSWER_WITHIN_S
from tests.helpers import PROFILE, examples

for name in ("fast", "thorough"):
    settings.register_profile(
        name,
        max_examples=examples(100, profile=name),
        derandomize=True,  # equal examples in every run; a failure prints code that reproduces it
        database=None,
        deadline=None,  # the machine may be busy with other work
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(PROFILE)

# A shell that starts the tests in the background makes them, and the processes that they start, ignore Ctrl-C.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # the models are tiny; a second thread costs more time than it saves


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the thorough tests first. At the end, a slow one would occupy one worker while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("thorough") is None)


@pytest.fixture(scope="session")
def _base() -> Any:
    return tiny_model("llama")


@pytest.fixture
def base(_base: Any) -> Any:
    """A tiny Llama that no other test uses."""
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
    assert not complaints, f"the event loop reported {complaints}"


def client_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("symbiosis-")]
    return [name for name in names if name != LANE]


LANE = "symbiosis-dist"
"""Name of the threads of lanes. They end by themselves, within seconds if the other side was killed."""


@pytest.fixture(scope="session")
def lanes_left() -> Iterator[dict[threading.Thread, str]]:
    """Threads of lanes that have outlived a test, and the test of each. At the end, they must have ended."""
    left: dict[threading.Thread, str] = {}
    yield left
    end = time.monotonic() + 40
    for thread in left:
        thread.join(max(end - time.monotonic(), 0))
    remaining = [test for thread, test in left.items() if thread.is_alive()]
    assert not remaining, f"lanes left behind by {remaining}"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, lanes_left: dict[threading.Thread, str]) -> Iterator[None]:
    """Check that no task, client thread or torch mode outlives a test, and that the event loop reported no error."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_nothing_left_on_the_loop")
    yield
    for thread in threading.enumerate():
        if thread.name == LANE:
            lanes_left.setdefault(thread, request.node.nodeid)
        elif thread.name == "symbiosis-join":  # it may have handed over its connection a moment ago
            thread.join(ANSWER_WITHIN_S + 1)
    assert not client_threads(), f"threads left behind: {client_threads()}"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def stops_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is in a walk and sends no request holds up batches for a minute, however busy the machine is."""
    for module in ("clients", "scheduler"):
        monkeypatch.setattr(f"symbiosis.core.{module}.STOPPED_S", 60.0)


@pytest.fixture
def hub_requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Allow requests to a hub, refuse all connections, and return what was asked for."""
    asked: list[Any] = []

    def connect(*where: Any) -> None:
        asked.append(where)
        raise OSError("the test allows no connection")

    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked
