"""The pads of one key: which are used, which effects are ready, and which effects are waited for.

A pad and its effect belong to a number. Pads are drawn in order, so the number of the next one is all the state that
has to survive. Drawing may be interrupted anywhere (Ctrl-C): numbers below ``next`` are then never used again, and the
effect of a number stays the same.

Legend: n rows.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.errors import PrivacyError
from symbiosis.log import get_logger
from symbiosis.privacy.keystream import Keystream, blocks
from symbiosis.privacy.masks import MaskedKey
from symbiosis.privacy.pad_folder import PadFolder

log = get_logger(__name__)


class PadStock:
    """The pads of one key, drawn under the 32 bytes of a client's ``secret``, or of the folder's for this key. Its
    caller holds a lock.

    Raises:
        PrivacyError: it is unknown which pads in the folder were used, or this cannot be kept on disk.
    """

    def __init__(self, key: MaskedKey, secret: bytes, folder: PadFolder | None) -> None:
        layers, pass_, fp32, _ = key.key
        self.key = key
        self._name = f"{'.'.join(map(str, layers))}-{pass_.name.lower()}{'_fp32' if fp32 else ''}"
        self._folder = folder
        self._counter = None if folder is None else folder.counter(self._name)
        if self._counter is not None:
            secret = self._counter.secret
        self._secret = hashlib.blake2b(self._name.encode(), key=secret, digest_size=32).digest()
        self.next = 0 if self._counter is None else self._counter.value
        """Number of the next pad; those below are used."""
        self.made = self.next
        """Number of the first pad whose effect is not computed."""
        self._effects: deque[tuple[int, Results]] = deque()
        """Effects of consecutive pads, and the number of the first of them."""
        self._waits: list[tuple[int, int, Future[Any]]] = []
        """Draws that wait for their effects: number of the first pad, how many, and the future. A wait of
        :meth:`prepare` is a draw of no pads."""
        if folder is not None:
            stored = folder.read_effects(self._name, self._secret, self.next, sum(key.results), key.dtype)
            self.put(stored.split(key.results, dim=1))  # type: ignore[no-untyped-call]

    @property
    def ready(self) -> int:
        """Pads that are computed and unused."""
        return max(0, self.made - self.next)

    @property
    def awaited(self) -> bool:
        """Whether a draw waits for its effects."""
        return any(rows for _, rows, _ in self._waits)

    def pads(self, first: int, rows: int) -> torch.Tensor:
        """Return pads ``first``, ``first`` + 1, … as integers [rows, width]."""
        width, dtype = self.key.width, self.key.dtype
        return Keystream(self._secret, first * blocks(width, dtype)).integers(rows, width, dtype)

    def record(self, last: int) -> None:
        """Have pads below ``last`` counted on disk as used. Raises a PrivacyError if this is not possible."""
        if self._counter is not None and last > self._counter.value:
            self._counter.reach(last)

    def draw(self, rows: int, effects: Future[Results]) -> torch.Tensor:
        """Use the next pads, and return them; ``effects`` gets their effects now or when they are computed."""
        self.record(self.next + rows)
        first, self.next = self.next, self.next + rows
        noise = self.pads(first, rows)
        if self.made < self.next:
            self._waits.append((first, rows, effects))
        else:
            effects.set_result(self._take(first, rows))
        return noise

    def prepare(self, rows: int) -> Future[None]:
        """Return a future that is done when ``rows`` pads are ready."""
        ready: Future[None] = Future()
        if self.ready >= rows:
            ready.set_result(None)
        else:
            self._waits.append((self.next + rows, 0, ready))
        return ready

    def put(self, effects: Results) -> list[tuple[Future[Any], Any]]:
        """Add the effects of the next pads. Returns futures that are to be completed, with their results."""
        self._effects.append((self.made, effects))
        self.made += effects[0].shape[0]
        done: list[tuple[Future[Any], Any]] = []
        waits, self._waits = self._waits, []
        for first, rows, future in waits:
            if first + rows <= self.made:
                done.append((future, self._take(first, rows) if rows else None))
            else:
                self._waits.append((first, rows, future))
        return done

    def fail(self, error: BaseException) -> None:
        """End all waits for effects with an error."""
        waits, self._waits = self._waits, []
        for _, _, future in waits:
            future.set_exception(error)

    def save(self) -> None:
        """Keep ready effects on disk, and count their pads as unused there."""
        if self._folder is None or self._counter is None:
            return
        if self.ready:
            try:
                effects = torch.cat(self._take(self.next, self.ready), dim=1)
                self._folder.write_effects(self._name, self._secret, self.next, effects)
            except (OSError, RuntimeError) as error:  # no room on the disk, or in memory
                log.warning("effects of pads are not kept on disk", why=str(error))
        with contextlib.suppress(PrivacyError):  # the next client then skips pads that are ready
            self._counter.write(self.next)

    def _take(self, first: int, rows: int) -> Results:
        """Return the effects of pads ``first``, ``first`` + 1, …, which are computed, and forget earlier ones."""
        last = first + rows
        parts = []
        for start, effects in self._effects:
            if start >= last:
                break
            low, high = max(first - start, 0), last - start
            parts.append(tuple([effect[low:high] for effect in effects]))
        while self._effects and self._effects[0][0] + self._effects[0][1][0].shape[0] <= last:
            self._effects.popleft()
        return parts[0] if len(parts) == 1 else tuple([torch.cat(column) for column in zip(*parts, strict=True)])
