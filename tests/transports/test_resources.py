"""Full disks, and processes without memory."""

from __future__ import annotations

import resource
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import BusyError, RefusedError, ShareError
from symbiosis.testing import tiny_model
from tests.helpers import in_thread
from tests.service import Service, free_port, save_model


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_full_disk_at_the_tenant_is_named(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "w+b"))  # noqa: SIM115, PTH123
    model = tiny_model(vocab_size=65 + blocking)  # a share that no other client has here
    async with symbiosis.Executor(model) as executor:
        listener: Any = await executor.listen("tcp://127.0.0.1:0")
        async with symbiosis.connect(listener.address) as remote:
            connect = partial(in_thread, symbiosis.open_model(listener.address).__enter__)
            with pytest.raises(ShareError, match=r"cannot write the client's share .* No space left .* set TMPDIR"):
                await (connect() if blocking else remote.client().open())


def test_an_executor_without_address_space_is_busy_and_serves_others(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model", vocab_size=32_000)
    shm, tcp = f"shm://{tmp_path}/s.sock", f"tcp://127.0.0.1:{free_port()}"
    with Service(checkpoint, shm, "--listen", tcp, log=tmp_path / "service.log", fresh=True) as service:
        honest = make_transport(tcp).connect_blocking(tcp, "honest")
        head = Key((len(honest.layers) - 1,), Pass.FORWARD)
        small, large = (Call(head, Kind.PREFILL, (torch.ones(rows, 32),)) for rows in (1, 4000))
        honest.call(small)
        room = psutil.Process(service.pid).memory_info().vms + (200 << 20)
        resource.prlimit(service.pid, resource.RLIMIT_AS, (room, room))
        with pytest.raises(RefusedError, match="the executor cannot serve another client: Cannot allocate memory"):
            make_transport(shm).connect_blocking(shm, "needs an arena of 1 GiB")
        with pytest.raises(symbiosis.errors.SymbiosisError, match="memory"):  # of the layer, or of the answer
            honest.call(large)
        honest.call(small)
        honest.close()


def test_a_call_for_whose_tensors_there_is_no_memory_fails_alone(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model", hidden_size=512)
    tcp = f"tcp://127.0.0.1:{free_port()}"
    with Service(checkpoint, tcp, log=tmp_path / "service.log", fresh=True) as service:
        honest = make_transport(tcp).connect_blocking(tcp, "honest")
        small, large = (Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(n, 512),)) for n in (1, 200_000))
        honest.call(small)
        room = psutil.Process(service.pid).memory_info().vms + (100 << 20)
        resource.prlimit(service.pid, resource.RLIMIT_AS, (room, room))
        with pytest.raises(BusyError, match="no memory for this call"):
            honest.call(large)
        honest.call(small)
        honest.close()


def test_only_the_monotonic_clock_is_read() -> None:
    """The wall clock may jump."""
    sources = [path.read_text() for path in Path(symbiosis.__file__).parent.rglob("*.py")]
    assert len(sources) > 100
    for wall in ("time.time(", "time_ns(", "datetime.now", "utcnow", "gmtime", "localtime"):
        assert not [source for source in sources if wall in source], wall
