"""One-time pads in a folder: no pad is used twice, after any failure of the process, the files or the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.core.requests import Pass
from symbiosis.errors import PrivacyError
from symbiosis.privacy import LocalPads
from symbiosis.privacy.pad_folder import ENTRY, PadCounter, PadFolder
from tests.privacy.masking import Layers, Masking, assert_all_different, normal_rows

MODEL = Layers(32, 8)
X = normal_rows(2, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pads"


def opened(folder: Path, model: nn.Module = MODEL, **options: Any) -> Masking:
    return Masking(LocalPads(model, rows=8, folder=folder, **options), model)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
        return os.fork()


def test_pads_survive_a_restart(folder: Path) -> None:
    x = normal_rows(3, 32)
    noise = []
    for turn in range(5):
        with opened(folder) as masking:
            for _ in range(turn + 1):
                masking.assert_forward(x)
            masking.prepare()
            noise.append(masking.pads(x))
    assert_all_different(torch.cat(noise))
    assert sum(map(len, noise)) == 45
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    # After an orderly end, pads that were ready are ready again: no pad is skipped, and none is made again.
    with opened(folder, when_out="error") as masking:
        for _ in range(2):
            masking.assert_forward(x)


def test_pads_of_a_process_that_died_are_skipped(tmp_path: Path) -> None:
    """The counter on disk is always ahead of use, so a copy of the folder at any time is safe to continue from."""
    with opened(tmp_path / "alive") as masking:
        for turn in range(8):
            masking.ask((0,), Pass.FORWARD, X)
            shutil.copytree(tmp_path / "alive", tmp_path / f"died-{turn}")
        used = masking.pads(X)
    for turn in range(8):
        with opened(tmp_path / f"died-{turn}") as masking:
            masking.assert_forward(X)
            assert_all_different(torch.cat([used[: 2 * turn + 2], masking.pads(X)]))


def test_a_damaged_counter(folder: Path) -> None:
    """The used pads are unknown, so no pad is used. An empty file must not mean that all pads are unused."""
    for _ in range(2):
        with opened(folder) as masking:
            for _ in range(5):
                masking.ask((0,), Pass.FORWARD, X)
    (file,) = folder.glob("*.counter")
    whole = file.read_bytes()
    damaged = [whole[:cut] for cut in range(len(whole))] + [bytes(len(whole)), whole + bytes(1), whole + whole]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for data in damaged:
        file.write_bytes(data)
        with opened(folder) as masking:
            with pytest.raises(PrivacyError, match="counter is damaged or of an earlier version"):
                masking.ask((0,), Pass.FORWARD, X)
            assert not masking.masked()
    file.write_bytes(whole)
    with opened(folder) as masking:
        masking.ask((0,), Pass.FORWARD, X)


@pytest.mark.parametrize("died", [False, True])
def test_a_missing_counter(died: bool, tmp_path: Path, folder: Path) -> None:
    """Other pads are used from then on."""
    with opened(folder) as masking:
        masking.prepare()
        masking.ask((0,), Pass.FORWARD, X)
        used = masking.pads(X)
        shutil.copytree(folder, tmp_path / "died")
    left = tmp_path / "died" if died else folder
    (counter,) = left.glob("*.counter")
    counter.unlink()
    with opened(left) as masking:
        for _ in range(8):
            masking.assert_forward(X)
        assert_all_different(torch.cat([used, masking.pads(X)]))


def test_a_missing_model(folder: Path) -> None:
    """Effects on disk could belong to another model."""
    with opened(folder) as masking:
        masking.ask((0,), Pass.FORWARD, X)
    (folder / "model").unlink()
    for kept in ("*.counter", "*.effects"):
        with pytest.raises(PrivacyError, match=r"model is missing.*use another folder"):
            opened(folder)
        (file,) = folder.glob(kept)
        file.unlink()
    with opened(folder) as masking:  # no pad depends on the missing file
        masking.ask((0,), Pass.FORWARD, X)


@pytest.mark.parametrize("other_pads", [False, True])
def test_damaged_effects_are_computed_again(other_pads: bool, folder: Path) -> None:
    with opened(folder) as masking:
        masking.prepare()
    (kept,) = folder.glob("*.effects")
    data = bytearray(kept.read_bytes())
    if other_pads:
        (counter,) = folder.glob("*.counter")
        counter.unlink()
    else:
        data[ENTRY.size + 3] ^= 0x40  # the exponent of the first number of the first pad
        kept.write_bytes(data)
    with opened(folder) as masking:
        for _ in range(6):
            masking.assert_forward(X)


def test_counters_never_decrease(tmp_path: Path) -> None:
    counter = PadCounter(tmp_path / "counter")
    for value in (5, 3, 9, 7):
        counter.reach(value)
    assert counter.value == PadCounter(tmp_path / "counter").value == 9


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Effects need not be kept. Pads whose use cannot be recorded are not used until there is room again."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(folder) as masking:
        masking.prepare()
        (folder / "0-forward.effects").symlink_to("/dev/full")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(
                PrivacyError, match=r"cannot be kept on disk .*No space left.*nothing was sent. Make room"
            ):
                masking.ask((1,), Pass.FORWARD, X)
        for _ in range(10):
            masking.assert_forward(X, 1)
    (folder / "0-forward.effects").unlink()
    with opened(folder) as again:
        for layer in (0, 1):
            again.assert_forward(X, layer)
        assert_all_different(torch.cat([masking.pads(X), again.pads(X)[2:]]))


def test_pads_are_recorded_as_used_before_a_request_needs_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request then does not wait for the disk."""
    threads = []
    fsync = os.fsync

    def watched(file: int) -> None:
        threads.append(threading.current_thread().name)
        fsync(file)

    with opened(folder) as masking:
        masking.prepare()
        monkeypatch.setattr(os, "fsync", watched)
        for _ in range(8):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
            masking.prepare()
        monkeypatch.undo()
    assert set(threads) == {"symbiosis-pads"}


def test_pads_keep_no_files_open(folder: Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]).requires_grad_(False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with opened(folder, model) as masking:
        for layer in range(30):
            masking.ask((layer,), Pass.FORWARD, torch.ones(2, 4))
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
    assert len(list(folder.glob("*.effects"))) == 30


def test_a_folder_is_free_while_a_forked_child_lives(folder: Path) -> None:
    """The child shares the lock in any case."""
    read, write = os.pipe()
    with opened(folder):
        child = fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # returns when the parent closes the pipe
            os._exit(0)
        os.close(read)
    try:
        with opened(folder) as masking:
            masking.ask((0,), Pass.FORWARD, X)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_use_its_parents_pads(folder: Path) -> None:
    """The child gets an error, also if a thread held the lock of the pads when the process was forked."""
    held, release = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with masking.mask._lock:
            held.set()
            release.wait(60)

    with opened(folder) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))
        masking.prepare()
        (file,) = folder.glob("*.counter")
        before = file.read_bytes()
        thread = threading.Thread(target=hold_lock)
        thread.start()
        held.wait(60)
        child = fork()
        if not child:
            code = 1
            try:
                masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
            except PrivacyError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                masking.channel.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        release.set()
        thread.join()
        assert file.read_bytes() == before
        assert PadCounter(file).value >= 3
        masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))


def test_a_relative_folder_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the program changes its working directory to one with pads of that name."""
    counters = []
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        monkeypatch.chdir(tmp_path / run)
        with opened(Path("pads")) as masking:
            masking.ask((0,), Pass.FORWARD, X)
        counters += (tmp_path / run / "pads").glob("*.counter")
    of_a, of_b = counters
    before = PadCounter(of_a).value, PadCounter(of_b).value
    monkeypatch.chdir(tmp_path / "a")
    with opened(Path("pads")) as masking:
        monkeypatch.chdir(tmp_path / "b")
        masking.ask((0,), Pass.FORWARD, X)
    assert (PadCounter(of_a).value, PadCounter(of_b).value) == (before[0] + len(X), before[1])


def test_a_failed_close_leaves_the_folder_to_the_next_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masking = opened(folder)
    masking.ask((0,), Pass.FORWARD, X)
    masking.prepare()
    with monkeypatch.context() as patched:
        patched.setattr(PadCounter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            masking.channel.close()
    opened(folder).channel.close()


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(PrivacyError, match=r"cannot be locked \(No locks available\)"):
        opened(folder)


def test_a_refused_accuracy_leaves_the_folder_to_the_next_client(folder: Path) -> None:
    with pytest.raises(PrivacyError, match="leaves no room for noise") as refused:
        opened(folder, accuracy=1e-9)
    opened(folder).channel.close()
    assert refused.traceback  # as a notebook does, this keeps what the failed call held


def test_a_folder_has_one_client_of_one_model(tmp_path: Path, folder: Path) -> None:
    with opened(folder), pytest.raises(PrivacyError, match="in use by another client"):
        opened(folder)
    with pytest.raises(PrivacyError, match="pads for another model"):
        opened(folder, Layers(seed=1))
    folder.chmod(0o755)
    with pytest.raises(PrivacyError, match="accessible to other users"):
        opened(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivacyError, match="cannot be used"):
        PadFolder(tmp_path / "file", "weights")
