"""The list of addresses over HTTP, and processes that end with the one that started them."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from symbiosis.cluster.directory import DirectoryActor
from symbiosis.cluster.plan import ClusterPlan, Model
from symbiosis.core.registry import make_transport
from symbiosis.errors import ConnectionLostError, UsageError
from symbiosis.terminal import child
from tests.cluster.nodes import until
from tests.service import free_port, save_model


@pytest.fixture
def directory() -> Iterator[DirectoryActor]:
    made = DirectoryActor(ClusterPlan((Model("llama", ()),), port=free_port()))
    yield made
    made.close()


def get(directory: DirectoryActor, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{directory.plan().port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def report(name: str, address: str) -> tuple[str, dict[str, Any]]:
    return name, {"model": "llama", "state": "serving", "address": address}


def test_the_list_follows_reports(directory: DirectoryActor) -> None:
    for path, status in (("/llama", "503"), ("/", "404"), ("/nothing", "404")):
        with pytest.raises(urllib.error.HTTPError, match=status) as caught:
            get(directory, path)
        caught.value.close()
    address = f"http://127.0.0.1:{directory.plan().port}"
    for name, error, why in (
        ("lama", UsageError, "no model has this name; there are llama"),
        ("llama", ConnectionLostError, "no executor of this model serves now"),
    ):
        with pytest.raises(error, match=why):
            make_transport(f"{address}/{name}").look(f"{address}/{name}")
    directory.report(*report("llama/0/0", "tcp://a:1"))
    directory.report(*report("llama/0/1", "tcp://b:1"))
    assert get(directory, "/llama") == "tcp://a:1\ntcp://b:1\n"
    directory.report(*report("llama/0/0", "tcp://c:1"))
    directory.forget(["llama/0/1"])
    directory.report(*report("llama/0/1", "tcp://b:1"))
    assert get(directory, "/llama") == "tcp://c:1\n"
    assert set(directory.reports()) == {"llama/0/0"}
    directory.expect(["llama/0/1"])
    directory.report(*report("llama/0/1", "tcp://d:1"))
    assert get(directory, "/llama") == "tcp://c:1\ntcp://d:1\n", "another executor may have the name of one that ended"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_directory_on_ipv6() -> None:
    directory = DirectoryActor(ClusterPlan((Model("llama", ()),), host="::1", port=free_port()))
    try:
        directory.report(*report("llama/0/0", "tcp://a:1"))
        with urllib.request.urlopen(f"http://[::1]:{directory.plan().port}/llama", timeout=5) as answer:
            assert answer.read() == b"tcp://a:1\n"
    finally:
        directory.close()


def test_other_requests_change_nothing(directory: DirectoryActor) -> None:
    directory.report(*report("llama/0/0", "tcp://a:1"))
    for request in (b"POST /llama HTTP/1.1\r\n\r\n", b"\x00" * 100, b"GET " + b"a" * 70_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", directory.plan().port), timeout=5) as peer:
            peer.sendall(request)
            peer.shutdown(socket.SHUT_WR)
            assert b"tcp://" not in peer.recv(1000)
    assert get(directory, "/llama") == "tcp://a:1\n"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    model, address = save_model(tmp_path / "model"), f"tcp://127.0.0.1:{free_port()}"
    code = (
        "from symbiosis.terminal import child; "
        f"child.follow(child.start(['serve', '{model}', '--listen', '{address}']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        until(lambda: "serving" in parent.stderr.readline(), 60)
        (started,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert not psutil.wait_procs([started], timeout=10)[1]


def test_a_child_is_asked_to_end_first() -> None:
    with subprocess.Popen(["sleep", "100"], text=True) as process:
        child.stop(process, 5)
        assert process.wait(5) == -15


def test_a_full_disk_below_the_output_does_not_end_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(line: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(child.sys, "stderr", SimpleNamespace(write=write))
    ran: Any = SimpleNamespace(stdout=["loading\n", "serves\n"], wait=lambda: 0)
    assert child.follow(ran) == (0, "loading\nserves")
