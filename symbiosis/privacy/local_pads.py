"""One-time pads: the tenant computes the effects of its noise itself, from its own copy of the public weights.

What is sent is *exactly* uniform, whatever x is (:mod:`symbiosis.privacy.wrapped`): all that is seen of x is the
amplitude A, a power of two. With n the pad in units of A, and 2A·k what was wrapped, x·Wᵀ = s·Wᵀ − A·n·Wᵀ + 2A·k·Wᵀ:
the second is computed ahead, and the last, of one number in several hundred, from a few columns of W when the answer is
there.

Effects are computed ahead by a thread that gives way to others. Pads are drawn in order, each once; the number of the
next one is all there is to remember.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.client.cores import use_cores
from symbiosis.core.requests import Call, Key
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError, PrivacyError
from symbiosis.log import get_logger
from symbiosis.privacy.amplitude import WRAPPED_SCALE, Levels, whole
from symbiosis.privacy.keystream import BITS, Keystream, blocks
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.own_weights import OwnWeights, own_weights
from symbiosis.privacy.pad_folder import Counter, Effects, PadFolder
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wrapped import Turns, unwrap, wrap

__all__ = ["LocalPads"]

log = get_logger(__name__)

Results = tuple[torch.Tensor, ...]

_AT_A_TIME = 32
"""Pads whose effects are computed in one go: enough to read the weights for, few enough to give way soon."""
_NICENESS = 10


class LocalPads(Scheme):
    """Each row has a pad of its own, whose effect the tenant has computed itself.

    Args:
        model: the public base model: a folder, a hub id, or a model. It must be the one that the executor serves.
        rows: pads to have ready for each key (layers that are asked together, and in which direction). Their effects
            take as many numbers of memory as the results of so many rows.
        folder: where pads, their key and their counters outlive the process; by default they do not. One client at a
            time.
        when_out: ``"wait"`` until more are computed, or ``"error"``.
        scale: how far the amplitude is above the largest row of a request at most, and a quarter of that above usual
            ones. A larger one hides nothing more; it makes wrapped numbers rarer.
        accuracy: the error of results to aim at, instead of a scale, relative to what the largest row of a request
            comes to; see :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: a value that means nothing.
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
        whole(self.name, rows=rows)
        if when_out not in ("wait", "error"):
            raise PrivacyError(f"{self.name}: when_out is {when_out!r}; it can be 'wait' or 'error'")
        if folder is not None and not isinstance(folder, str | Path):
            raise PrivacyError(f"{self.name}: folder is {folder!r}; give a path (./{folder} on the command line)")
        self.model, self.rows, self.folder, self.when_out = model, rows, folder, when_out
        self._aims_at(scale, accuracy, WRAPPED_SCALE)

    def __repr__(self) -> str:
        return f"{self.name}:rows={self.rows},when_out={self.when_out},{self._said()}"

    def load(self, channel: Channel) -> OwnWeights:
        return own_weights(self.model, channel, self.name)

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Pads:
        (channel,) = channels
        own = self.load(channel)
        folder = None if self.folder is None else PadFolder(self.folder, channel.identity().weights)
        return Pads(own, folder, self.rows, self.when_out == "error", self.levels_at(channel, own.usual))


class _Stock:
    """The pads of one key. Numbers below ``next`` are used; effects are there up to ``made``.

    A draw may end anywhere in the middle (Ctrl-C), so pads and their effects are found by their number alone: whatever
    was left behind, ``next`` is beyond all that was used, and what belongs to a number stays so.
    """

    def __init__(self, asked: Asked, secret: bytes, counter: Counter | None, kept: Effects | None) -> None:
        self.asked = asked
        self.counter = counter
        self.kept = kept
        self.next = 0 if counter is None else counter.value
        rows = [] if kept is None else list(kept.read(self.next))
        self.made = self.next + len(rows)
        self._effects: deque[tuple[int, Results]] = deque()
        """Matrices of some rows, and the number of the pad that each begins with."""
        if rows:
            effects = torch.stack(rows).split(asked.results, dim=1)  # type: ignore[no-untyped-call]
            self._effects.append((self.next, effects))
        self.demands: deque[tuple[int, int, Future[Results]]] = deque()
        """Whose effects are waited for: the first pad, and how many."""
        self.goals: list[tuple[int, Future[None]]] = []
        """Up to where effects are to be there."""
        self._secret = secret

    def pads(self, first: int, rows: int) -> torch.Tensor:
        """[rows, width] of whole numbers: pads ``first``, ``first`` + 1…"""
        width, dtype = self.asked.width, self.asked.dtype
        return Keystream(self._secret, first * blocks(width, dtype)).integers(rows, width, dtype)

    def put(self, effects: Results) -> None:
        self._effects.append((self.made, effects))
        self.made += effects[0].shape[0]

    def take(self, first: int, rows: int) -> Results:
        """The effects of pads ``first``, ``first`` + 1…, which are there. Those of earlier ones are dropped."""
        last = first + rows
        parts = []
        for start, effects in self._effects:
            low, high = max(first - start, 0), min(last - start, effects[0].shape[0])
            if low < high:
                parts.append(tuple([effect[low:high] for effect in effects]))
        while self._effects and self._effects[0][0] + self._effects[0][1][0].shape[0] <= last:
            self._effects.popleft()
        return parts[0] if len(parts) == 1 else tuple([torch.cat(column) for column in zip(*parts, strict=True)])


class Pads:
    """The pads of one client, and the thread that computes their effects."""

    def __init__(self, own: OwnWeights, folder: PadFolder | None, rows: int, strict: bool, levels: Levels) -> None:
        self._own = own
        self._folder = folder
        self._rows = rows
        self._strict = strict
        self.levels = levels
        self._secret = os.urandom(32) if folder is None else folder.key
        self._stocks: dict[Key, _Stock] = {}
        self._lock = threading.RLock()
        """Taken as it is by whoever may be interrupted: a Ctrl-C as a condition is entered would leave it locked."""
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._failure: Exception | None = None
        """Why no more effects will come."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="symbiosis-pads", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------------- the tenant's

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        rows = x.shape[0]
        noise, effects = self._draw(asked, rows)
        sent, turns = wrap(asked, x, noise, amplitude)
        waits = () if effects.done() else (effects,)
        unmask = partial(self._unmask, asked, effects, amplitude, turns)
        return Masked((Call(asked.key, kind, (sent,)),), waits, unmask)

    def _unmask(
        self,
        asked: Asked,
        effects: Future[Results],
        amplitude: float,
        turns: Turns | None,
        answers: Sequence[Results],
    ) -> Results:
        (results,) = answers
        bare = tuple(
            [
                torch.sub(result, effect.to(result.device), alpha=amplitude)
                for result, effect in zip(results, effects.result(), strict=True)
            ]
        )
        if turns is not None:
            unwrap(self._own, asked, bare, turns)
        return bare

    def prepare(self, asked: Asked) -> Future[Any] | None:
        self._check_process()
        with self._lock:
            self._check()
            stock = self._stock(asked)
            goal = stock.next + self._rows
            ready: Future[None] = Future()
            if stock.made >= goal:
                ready.set_result(None)
            else:
                stock.goals.append((goal, ready))
                self._changed.notify()
        return ready

    def ready(self) -> dict[Key, int]:
        """How many pads of each key are computed and unused."""
        with self._lock:
            return {key: max(0, stock.made - stock.next) for key, stock in self._stocks.items()}

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._thread.join()
        error = ClientClosedError("the client of these pads was closed")
        for stock in self._stocks.values():
            _fail(stock, error)
            if stock.counter is not None:
                with contextlib.suppress(OSError):  # then those that are left are skipped
                    stock.counter.write(stock.next)
        if self._folder is not None:
            self._folder.close()

    def _draw(self, asked: Asked, rows: int) -> tuple[torch.Tensor, Future[Results]]:
        """The next pads of a key, and their effects."""
        effects: Future[Results] = Future()
        self._check_process()
        with self._lock:
            self._check()
            stock = self._stock(asked)
            if self._strict and stock.next + rows > stock.made:
                names = ", ".join(spec.name for spec in asked.layers)
                self._changed.notify()
                if rows > self._rows:
                    raise PrivacyError(
                        f"local-pads: {rows} rows for {names} in one request, and no more than {self._rows} pads are "
                        f"ever ready; nothing was sent. Give rows={rows} or more, or let it wait (when_out='wait')"
                    )
                raise PrivacyError(
                    f"local-pads: {rows} rows for {names}, and {max(0, stock.made - stock.next)} pads ready; nothing "
                    "was sent. Let the client idle, ask for more rows ahead, or let it wait (when_out='wait')"
                )
            last = stock.next + rows
            if stock.counter is not None and last > stock.counter.value:  # more than are made
                try:
                    stock.counter.reach(last)
                except OSError as error:
                    raise _not_kept(error) from error
            first, stock.next = stock.next, last
            noise = stock.pads(first, rows)
            if stock.demands or stock.made < last:
                stock.demands.append((first, rows, effects))
                self._changed.notify()
            else:
                effects.set_result(stock.take(first, rows))
                if stock.made - last <= self._rows // 2:
                    self._changed.notify()
        return noise, effects

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PrivacyError(
                "local-pads: these pads belong to the process that opened the client, and its forked child would use "
                "the same ones; open a client of its own there"
            )

    def _check(self) -> None:
        if self._closed:
            raise ClientClosedError("the client of these pads was closed")
        if self._failure is not None:
            raise PrivacyError(f"local-pads: no more pads can be made: {self._failure}") from self._failure

    def _stock(self, asked: Asked) -> _Stock:
        stock = self._stocks.get(asked.key)
        if stock is None:
            layers, pass_ = asked.key
            name = f"{'.'.join(map(str, layers))}-{pass_.name.lower()}"
            secret = hashlib.blake2b(name.encode(), key=self._secret, digest_size=32).digest()
            counter = kept = None
            if self._folder is not None:
                try:
                    counter = self._folder.counter(name)
                except OSError as error:
                    raise _not_kept(error) from error
                kept = self._folder.effects(name, sum(asked.results), asked.dtype)
            stock = self._stocks[asked.key] = _Stock(asked, secret, counter, kept)
        return stock

    # -------------------------------------------------------------------------------------------------- the thread's

    def _work(self) -> None:
        try:
            use_cores(1)
            _give_way()
            with torch.no_grad():
                while self._make():
                    pass
        except Exception as error:  # noqa: BLE001 (whoever waits for it must know)
            with self._changed:
                self._failure = error
                for broken in self._stocks.values():
                    _fail(broken, error)

    def _make(self) -> bool:
        """Compute the next effects, when there are some to compute. False when the client is closed."""
        with self._changed:
            while not self._closed and (job := self._job()) is None:
                self._changed.wait()
            if self._closed:
                return False
            assert job is not None
            stock, count = job
        noise = stock.pads(stock.made, count)
        unit = noise.to(stock.asked.dtype).mul_(2.0 ** (1 - BITS[stock.asked.dtype]))
        effects = self._own.effects(stock.asked, unit)
        self._keep(stock, effects, count)
        self._put(stock, effects)
        return True

    def _keep(self, stock: _Stock, effects: Results, count: int) -> None:
        """On disk: effects that are new, as far as there is room for them, and that their pads may be used."""
        if stock.kept is not None and stock.made + count > stock.next:
            try:
                stock.kept.write(stock.made, torch.cat(effects, dim=1), 2 * self._rows)
            except OSError as error:
                log.warning("pads are not kept on disk", why=str(error))
                stock.kept = None
        if stock.counter is not None:
            with contextlib.suppress(OSError):  # whoever uses them tries again, and says so
                stock.counter.reach(stock.made + count)

    def _job(self) -> tuple[_Stock, int] | None:
        """Whose effects come next, and how many: those that somebody waits for, then where the fewest are left."""
        if not self._stocks:
            return None
        stock = min(self._stocks.values(), key=lambda stock: (not stock.demands, stock.made - stock.next))
        lacking = stock.next + self._rows - stock.made
        if lacking <= 0:
            return None
        return stock, min(lacking, _AT_A_TIME)

    def _put(self, stock: _Stock, effects: Results) -> None:
        done: list[tuple[Future[Any], Any]] = []
        with self._changed:
            stock.put(effects)
            while stock.demands and sum(stock.demands[0][:2]) <= stock.made:
                first, rows, future = stock.demands.popleft()
                done.append((future, stock.take(first, rows)))
            reached = [goal for goal in stock.goals if goal[0] <= stock.made]
            stock.goals = [goal for goal in stock.goals if goal[0] > stock.made]
            done += [(future, None) for _, future in reached]
        for future, result in done:
            future.set_result(result)


def _not_kept(error: OSError) -> PrivacyError:
    return PrivacyError(
        f"local-pads: it cannot be kept on disk which pads are used ({error.strerror or error}), so none can be; "
        "nothing was sent. Make room, and try again"
    )


def _give_way() -> None:
    """Have this thread run when others do not, as far as that can be said here."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # one that gives way more already may not be let back
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _fail(stock: _Stock, error: BaseException) -> None:
    """Whoever waits for effects of this stock gets an error."""
    waiting: list[Future[Any]] = [future for *_, future in stock.demands]
    waiting += [future for _, future in stock.goals]
    stock.demands.clear()
    stock.goals.clear()
    for future in waiting:
        future.set_exception(error)
