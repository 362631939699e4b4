"""One-time pads: the tenant computes the effects of its noise itself, from its own copy of the public weights.

What is sent is *exactly* uniform, whatever x is (:mod:`symbiosis.privacy.wrapped`). The executor sees only the
amplitude A, a power of two. With the pad n in units of A and the wrapped part 2A·k, x·Wᵀ = s·Wᵀ − A·n·Wᵀ + 2A·k·Wᵀ. The
second term is computed ahead of time, by a thread of low priority. The third concerns one number in several hundred,
and is computed from a few columns of W when the answer arrives.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.client.cores import use_cores
from symbiosis.core.requests import Call, Results
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError, PrivacyError
from symbiosis.privacy.amplitude import WRAPPED_SCALE, Amplitudes, check_positive_integers
from symbiosis.privacy.keystream import grid_step
from symbiosis.privacy.masks import Mask, MaskedKey, MaskedRows, SendCall
from symbiosis.privacy.own_weights import OwnWeights
from symbiosis.privacy.pad_folder import PadFolder
from symbiosis.privacy.pad_stock import PadStock
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wrapped import Wrapped, unwrap, wrap

_BATCH = 32
"""Pads whose effects are computed together. They share one read of the weights, and take a short time."""
_NICENESS = 10


class LocalPads(Scheme):
    """Each row has a one-time pad, whose effect the tenant computes itself.

    Args:
        model: the public base model that the executor serves: a folder, a hub id or a model.
        rows: pads to keep ready for each key (layers that are requested together, and a direction). Their effects take
            as much memory as the results of so many rows.
        folder: folder for pads, their secrets and their counters, used by one client at a time. By default pads end
            with the process.
        when_out: ``"wait"`` until more pads are computed, or ``"error"``.
        scale: largest ratio of the amplitude to the rms of the largest row; for rows of typical size it is a quarter of
            that. A larger scale hides nothing more; it makes wrapped numbers rarer.
        accuracy: largest error of results, instead of a scale, relative to the result of the request's largest row;
            see :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: an option is out of range.
    """

    name = "local-pads"

    def __init__(
        self,
        model: str | Path | nn.Module,
        rows: int = 64,
        folder: str | Path | None = None,
        when_out: str = "wait",
        scale: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        check_positive_integers(self.name, rows=rows)
        if when_out not in ("wait", "error"):
            raise PrivacyError(f"{self.name}: when_out is {when_out!r}; it can be 'wait' or 'error'")
        if folder is not None and not isinstance(folder, str | Path):
            raise PrivacyError(f"{self.name}: folder is {folder!r}; give a path (./{folder} on the command line)")
        self.model, self.rows, self.folder, self.when_out = model, rows, folder, when_out
        self._set_size(scale, accuracy, WRAPPED_SCALE)

    def __repr__(self) -> str:
        return f"{self.name}:rows={self.rows},when_out={self.when_out},{self._describe_size()}"

    def begin(self, channels: Sequence[Channel], send: SendCall) -> Pads:
        (channel,) = channels
        own = self.load(channel)
        assert own is not None
        amplitudes = self.amplitudes_for(channel, own.typical)  # before the folder is locked, because it may raise
        folder = None if self.folder is None else PadFolder(self.folder, channel.identity().weights)
        return Pads(self, own, folder, amplitudes)


class Pads(Mask):
    """The pads of one client, and the thread that computes their effects ahead of time.

    The thread serves draws that wait first, and then the key with the fewest pads ready.
    """

    def __init__(self, options: LocalPads, own: OwnWeights, folder: PadFolder | None, amplitudes: Amplitudes) -> None:
        self.amplitudes = amplitudes
        self._own = own
        self._folder = folder
        self._rows = options.rows
        self._strict = options.when_out == "error"
        self._secret = os.urandom(32)
        self._stocks: dict[MaskedKey, PadStock] = {}
        self._lock = threading.RLock()
        """Entered directly on threads that may get a Ctrl-C: interrupting a condition's entry would leave it locked."""
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._failure: Exception | None = None
        """The error that ended the thread."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="symbiosis-pads", daemon=True)
        self._thread.start()

    def mask(self, key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
        noise, effects = self._draw(key, x.shape[0])
        sent, wrapped = wrap(key, x, noise, amplitude)
        waits = () if effects.done() else (effects,)
        unmask = partial(self._unmask, key, effects, amplitude, wrapped)
        return MaskedRows((Call(key.key, kind, (sent,)),), waits, unmask)

    def _unmask(
        self,
        key: MaskedKey,
        effects: Future[Results],
        amplitude: float,
        wrapped: Wrapped | None,
        answers: Sequence[Results],
    ) -> Results:
        (results,) = answers
        bare = tuple(
            [
                torch.sub(result, effect if result.is_cpu else effect.to(result.device), alpha=amplitude)
                for result, effect in zip(results, effects.result(), strict=True)
            ]
        )
        if wrapped is not None:
            unwrap(self._own, key, bare, wrapped)
        return bare

    def prepare(self, key: MaskedKey) -> Future[Any] | None:
        self._check_process()
        with self._lock:
            self._check_open()
            ready = self._stock(key).prepare(self._rows)
            self._changed.notify()
        return ready

    def close(self) -> None:
        if os.getpid() != self._pid:  # the thread and the folder are the parent's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        try:
            self._thread.join()
            error = ClientClosedError("the client of these pads was closed")
            for stock in self._stocks.values():
                stock.fail(error)
                stock.save()
        finally:  # also after Ctrl-C, unless the thread still counts pads
            if self._folder is not None and not self._thread.is_alive():
                self._folder.close()

    def _draw(self, key: MaskedKey, rows: int) -> tuple[torch.Tensor, Future[Results]]:
        """Use the next pads of a key. Returns them as integers [rows, width], and the future of their effects."""
        effects: Future[Results] = Future()
        self._check_process()
        with self._lock:
            self._check_open()
            stock = self._stock(key)
            if self._strict and rows > stock.ready:
                self._changed.notify()
                raise self._too_few(stock, rows)
            noise = stock.draw(rows, effects)
            if stock.awaited or stock.ready <= self._rows // 2:
                self._changed.notify()
        return noise, effects

    def _too_few(self, stock: PadStock, rows: int) -> PrivacyError:
        names = ", ".join(spec.name for spec in stock.key.layers)
        if rows > self._rows:
            return PrivacyError(
                f"local-pads: {rows} rows for {names} in one request, but no more than {self._rows} pads are ever "
                f"ready; nothing was sent. Give rows={rows} or more, or when_out='wait'"
            )
        return PrivacyError(
            f"local-pads: {rows} rows for {names}, but only {stock.ready} of its pads ready; nothing was sent. Wait "
            "between requests, give a larger number of rows, or when_out='wait'"
        )

    def _check_process(self) -> None:
        """Raise an error in a forked child. There the lock may be held by a thread that does not exist any more."""
        if os.getpid() != self._pid:
            raise PrivacyError(
                "local-pads: the pads belong to the process that opened the client, and its forked child would use the "
                "same ones; open another client in the child"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the client of these pads was closed")
        if self._failure is not None:
            raise PrivacyError(
                f"local-pads: no more pads can be made for this client, so open another one: {self._failure}"
            ) from self._failure

    def _stock(self, key: MaskedKey) -> PadStock:
        stock = self._stocks.get(key)
        if stock is None:
            stock = self._stocks[key] = PadStock(key, self._secret, self._folder)
        return stock

    # The following methods run on the thread of the pads.

    def _work(self) -> None:
        try:
            use_cores(1)
            _lower_priority()
            with torch.no_grad():
                while (job := self._next_job()) is not None:
                    self._make(*job)
        except Exception as error:  # noqa: BLE001 (the error belongs to the threads that wait for effects)
            with self._changed:
                self._failure = error
                for stock in self._stocks.values():
                    stock.fail(error)

    def _next_job(self) -> tuple[PadStock, int] | None:
        """Wait for effects to compute. Returns their stock and number, or None when the client is closed."""
        with self._changed:
            while not self._closed:
                if self._stocks:
                    stock = min(self._stocks.values(), key=lambda stock: (not stock.awaited, stock.made - stock.next))
                    lacking = stock.next + self._rows - stock.made
                    if lacking > 0:
                        return stock, min(lacking, _BATCH)
                self._changed.wait()
        return None

    def _make(self, stock: PadStock, count: int) -> None:
        """Compute the effects of the next ``count`` pads of a stock."""
        noise = stock.pads(stock.made, count)
        effects = self._own.effects(stock.key, noise.to(stock.key.dtype).mul_(grid_step(stock.key.dtype)))
        with contextlib.suppress(PrivacyError):  # the request that uses them tries again, and reports the error
            stock.record(stock.made + count)
        with self._changed:
            done = stock.put(effects)
        for future, result in done:
            future.set_result(result)


def _lower_priority() -> None:
    """Have the system run this thread when other threads do not need the processor, where the system allows it."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a thread of lower priority may not be raised to this one
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
