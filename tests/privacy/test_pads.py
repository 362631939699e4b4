"""One-time pads in memory: each is used once, and errors of the thread that computes their effects are reported."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from symbiosis.core.requests import Call, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import PrivacyError
from symbiosis.privacy import LocalPads, SecretShares, keystream, local_pads, pad_folder, pad_stock
from symbiosis.privacy.own_weights import OwnWeights
from tests.privacy.masking import FORWARD, Layers, Masking, ask_on_thread, assert_all_different, normal_rows

MODEL = Layers(32, 8)


@pytest.mark.parametrize("rows", [1, 5])
def test_pads_are_used_once(rows: int) -> None:
    x = normal_rows(rows, 32)
    with Masking(LocalPads(MODEL, rows=4), MODEL) as masking:
        for _ in range(30):
            masking.ask((0,), Pass.FORWARD, x)
        assert_all_different(masking.pads(x))


@pytest.mark.parametrize("folder", [False, True])
def test_pads_are_used_once_for_rows_of_two_dtypes(folder: bool, tmp_path: Path) -> None:
    """A narrow layer and a product of wider rows with its weight are sent under one key, in fp32, and so have one stock
    of pads, which their folder counts."""
    model = Layers(32, 8, torch.bfloat16)
    x = normal_rows(4, 32).bfloat16()
    sessions = []
    for wide in (True, False):
        with Masking(LocalPads(model, rows=4, folder=tmp_path / "pads" if folder else None), model) as masking:
            for _ in range(3):
                (y,) = masking.channel.call(Call(FORWARD, Kind.DECODE, (x,)))
                assert y.dtype is torch.bfloat16
                if wide:
                    (y,) = masking.channel.call(Call(FORWARD._replace(fp32=True), Kind.DECODE, (x.float(),)))
                    assert y.dtype is torch.float32
                    masking.assert_accurate(y, x.float())
            sessions.append(masking.pads(x.float()))
            assert_all_different(sessions[-1])
    if folder:
        assert_all_different(torch.cat(sessions))


def test_a_request_that_needs_more_pads_than_are_ready() -> None:
    """The request waits, or raises an error before rows are sent."""
    with Masking(LocalPads(MODEL, rows=4, when_out="error"), MODEL) as masking:
        masking.prepare()
        with pytest.raises(
            PrivacyError, match=r"5 rows for first in .* no more than 4 .*; nothing was sent. Give rows=5"
        ):
            masking.ask((0,), Pass.FORWARD, torch.ones(5, 32))
        assert not masking.masked()
        with masking.mask._changed:  # no pads are made in the meantime
            masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))
            with pytest.raises(
                PrivacyError, match=r"4 rows for first, but only 1 of its pads ready; nothing was sent.*when_out"
            ):
                masking.ask((0,), Pass.FORWARD, torch.ones(4, 32))
    with Masking(LocalPads(MODEL, rows=4), MODEL) as masking:
        (y,) = masking.ask((0,), Pass.FORWARD, torch.ones(500, 32))
        assert y.shape == (500, 8)


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "folder"])
def test_an_interrupted_draw(folder: bool, tmp_path: Path) -> None:
    """After a Ctrl-C at any line of a draw, later results are right, and no pad is used twice."""
    files = (local_pads.__file__, pad_stock.__file__, keystream.__file__, pad_folder.__file__)
    left = 0
    names = set()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        # An error from a tracer at the end of a `with`, or at a `try`, can bypass the release of a lock. Signals come
        # after calls and jumps only.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with", "try")):
            left -= 1
            if left == 0:
                names.add(Path(frame.f_code.co_filename).name)
                raise KeyboardInterrupt
        return trace

    x = normal_rows(3, 32)
    interrupted = 0
    with Masking(LocalPads(MODEL, rows=2, folder=tmp_path / "pads" if folder else None), MODEL) as masking:
        for left_at_first in range(1, 1000):
            left = left_at_first
            sys.settrace(trace)
            try:
                masking.ask((0,), Pass.FORWARD, x)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            y = ask_on_thread(masking, x)
            assert y is not None
            masking.assert_accurate(y, x)
            if left > 0:
                break
        assert interrupted > 20
        assert ("pad_folder.py" in names) is folder
        assert_all_different(masking.pads(x))


def test_a_thread_keeps_its_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may not let the thread return to a higher priority. Pads are made nevertheless."""
    requested: list[int] = []

    def refused(which: int, who: int, niceness: int) -> None:
        requested.append(niceness)
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", refused)
    with Masking(LocalPads(MODEL, rows=4), MODEL) as masking:
        assert ask_on_thread(masking, torch.ones(1, 32)) is not None
    assert requested == [15]


def test_the_thread_that_makes_pads_uses_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads keep their number of cores, including threads that start later."""
    effects, threads = OwnWeights.effects, set()

    def watched(*arguments: Any) -> Any:
        threads.add(torch.get_num_threads())
        return effects(*arguments)

    monkeypatch.setattr(OwnWeights, "effects", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Masking(LocalPads(MODEL, rows=8), MODEL) as masking:
            masking.prepare()
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert threads == {1}
        assert later == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", ["use_cores", "_lower_priority"])
def test_a_thread_that_fails_at_its_start(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_pads, function, lambda *_: 1 / 0)
    with Masking(LocalPads(MODEL, rows=4), MODEL) as masking:
        masking.mask._thread.join(300)
        with pytest.raises(PrivacyError, match="no more pads can be made for this client"):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))


@pytest.mark.parametrize("work", ["request", "preparation"])
def test_effects_that_cannot_be_computed(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait raises the error, and later ones raise an error that refers to it."""
    monkeypatch.setattr(OwnWeights, "effects", lambda *_: 1 / 0)
    with Masking(LocalPads(MODEL, rows=8), MODEL) as masking:

        def wait() -> None:
            if work == "request":
                masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
            else:
                masking.prepare()

        with pytest.raises(ZeroDivisionError):
            wait()
        with pytest.raises(PrivacyError, match="no more pads can be made for this client"):
            wait()


def test_clients_of_one_process_share_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(
        "symbiosis.privacy.own_weights.load_model", lambda path, dtype: loaded.append(path) or Layers(32, 8)
    )
    shares = SecretShares("b", model=tmp_path)
    with Masking(LocalPads(tmp_path), MODEL) as one, Masking(LocalPads(tmp_path), MODEL) as two:
        with Masking(shares, MODEL) as three:
            for masking in (one, two, three):
                masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
        assert loaded == [tmp_path]
