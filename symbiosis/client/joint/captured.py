"""Captured walks: joint walks that a CUDA graph repeats, so that a token takes one launch instead of thousands.

A CUDA graph reads and writes fixed addresses. So each client keeps one row of a walk for as long as it decodes, its
cache is in a :class:`~symbiosis.client.joint.pool.Pool`, and tokens, positions and lengths are copied to fixed
addresses before each walk. The rows of clients that do not take part are computed too, and their results are not used.
A row attends to as many tokens as its length says. Behind them are zeros, and a token of a client that does not take
part.

The base layers are part of the graph. For the executor, a captured walk is one request for all layers that runs by
itself: the policy decides when, and statistics and accounts name the clients of the walk
(docs/decisions/0042-captured-walks.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicLayer

from symbiosis.client.joint import Here
from symbiosis.client.joint.adapters import Adapted
from symbiosis.client.joint.attention import JointError, structure
from symbiosis.client.joint.captured_walk import CapturedWalk
from symbiosis.client.joint.model import JointModel, Trial
from symbiosis.client.joint.pool import Pool
from symbiosis.client.joint.reading import Reading
from symbiosis.client.joint.stacks import Slot
from symbiosis.client.requester import Requester
from symbiosis.core.requests import Call, Key, Pass, Results
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel

log = logging.getLogger(__name__)

MAX_ROWS = 64
"""Most rows of a walk. More clients are walked without a capture."""
STEADY = 4
"""Joint walks of the same clients after which their walk is captured. A capture takes as long as several walks."""
_FIRST = 256
"""Tokens that rows have room for at first. More room is made by doubling, with a new capture."""
_PART = 0.5
"""Part of the device's free memory that a pool may take."""


class Walker(Protocol):
    """A client in walks: what a :class:`~symbiosis.client.joint.decoder.Seat` has."""

    name: str
    version: int
    slots: dict[str, Slot]

    @property
    def reading(self) -> Reading: ...


class Token(Protocol):
    """One client's next token, on its way into a walk: what a step of the decoder has."""

    @property
    def seat(self) -> Walker: ...
    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def position(self) -> torch.Tensor: ...
    @property
    def attention(self) -> torch.Tensor | None: ...
    @property
    def cache(self) -> Any: ...
    @property
    def reply(self) -> asyncio.Future[Any]: ...


class CapturedWalks:
    """The captured walks of a joint model.

    Args:
        model: the joint model.
        here: the executor, in this process.
        requester: the requester of the joint model's layers.
        trials: what the model gives for some texts.
        device: the model's device.

    Attributes:
        refusal: why no walk is captured, or None.
    """

    def __init__(
        self, model: JointModel, here: Here, requester: Requester, trials: Sequence[Trial], device: torch.device
    ) -> None:
        self.refusal: str | None = None
        self._model = model
        self._here = here
        self._requester = requester
        self._device = device
        self._rows: list[Walker] = []
        """The clients, by row."""
        self._versions: list[int] = []
        """Versions of the clients' readings whose adapters are in the walk."""
        self._steady = 0
        """Joint walks that these clients have made."""
        self._walk: CapturedWalk | None = None
        self._under_way = False
        self._key = Key((0,), Pass.FORWARD)
        self._told: set[str] = set()
        try:
            self._check(trials)
        except JointError as error:
            self.refusal = str(error)
        except Exception as error:  # noqa: BLE001 (clients are walked without a capture then)
            self.refusal = f"a walk in a pool failed: {type(error).__name__}: {error}"
        if self.refusal is not None:
            self._tell(self.refusal)

    @torch.no_grad()
    def _check(self, trials: Sequence[Trial]) -> None:
        """Walk texts of different lengths in a pool, with empty rows between them, and compare the results."""
        if any(structure(trial.cache) != (DynamicLayer,) * len(trial.cache.layers) for trial in trials):
            raise JointError("its cache has layers with a window")
        pool = Pool(trials[0].cache, 2 * len(trials), 2 * max(trial.cache.get_seq_length() for trial in trials))
        walk = self._walk_in(pool, [])
        rows = [2 * number for number, _ in enumerate(trials)][::-1]
        for row, trial in zip(rows, trials, strict=True):
            if not pool.put(row, trial.cache):
                raise JointError("its cache has layers of several lengths")
        walk.place([(row, trial.token, trial.position, None) for row, trial in zip(rows, trials, strict=True)])
        walk.compute()
        for row, trial in zip(rows, trials, strict=True):
            trial.compare(walk.logits[row : row + 1])
        if len(walk.widths) < 2:  # siblings take rows of one width, so the key below may be that of other requests
            raise JointError("its base layers all take rows of one width")
        self._key = Key(tuple(sorted(walk.layers)), Pass.FORWARD)

    def unseat(self, seat: Walker) -> None:
        """Forget a client. Its adapter may be freed."""
        if seat in self._rows:
            self._versions = []  # forgets the clients' rows, at the end of a walk under way
            if not self._under_way:
                self.forget()

    async def outputs(self, steps: Sequence[Token], channel: Channel) -> list[Any] | None:
        """Return the outputs for the tokens of several clients; None if they are to be walked without a capture."""
        try:
            placed = self._place(steps)
        except Exception as error:  # noqa: BLE001 (such as no memory for the pool)
            self._refuse(error)
            self.forget()
            return None
        if placed is None:
            return None
        walk, rows = placed
        tokens = [(row, step.ids, step.position, step.attention) for row, step in zip(rows, steps, strict=True)]
        ids = walk.ids[: len(rows)]
        failed = False

        def run() -> Results:
            nonlocal failed
            was_run = walk.was_run
            try:
                walk.place(tokens)
                walk.run()
            except Exception as error:  # noqa: BLE001 (the clients are walked without a capture then)
                failed = True
                if was_run:
                    self._tell(f"a client's token failed: {type(error).__name__}: {error}")
                else:
                    self._refuse(error)
            return (ids,)

        reply = self._here.submit(Call(self._key, Kind.DECODE, (ids,), tuple([step.seat.name for step in steps]), run))
        channel.flush()
        self._under_way = True
        try:
            await reply
            return None if failed else self._taken(walk, rows, steps)
        finally:
            self._under_way = False
            if not self._versions or self.refusal is not None:
                self.forget()

    def _refuse(self, error: Exception) -> None:
        """Capture no walk from now on."""
        self.refusal = f"a walk could not be captured: {type(error).__name__}: {error}"
        log.warning("joint walks are not captured: %s", self.refusal, exc_info=error)

    def _taken(self, walk: CapturedWalk, rows: Sequence[int], steps: Sequence[Token]) -> list[Any]:
        """Return the outputs of a walk, and count its tokens in the caches."""
        outputs = []
        for row, step in zip(rows, steps, strict=True):
            if not step.reply.done():
                walk.pool.add_token(row, step.cache)
            outputs.append(walk.output(logits=walk.logits[row : row + 1].clone(), past_key_values=step.cache))
        return outputs

    def _place(self, steps: Sequence[Token]) -> tuple[CapturedWalk, list[int]] | None:
        """Return a captured walk that can serve these tokens now, and the row of each."""
        if self.refusal is not None or not self._are_steady([step.seat for step in steps]):
            return None
        reason = next(filter(None, map(self._unfit, steps)), None)
        if reason is not None:
            self._tell(reason)
            return None
        least, walk = max(step.cache.get_seq_length() for step in steps) + 1, self._walk
        if walk is None or least > walk.pool.capacity:
            walk = self._make(steps, least)
            if walk is None:
                return None
        rows = [self._rows.index(step.seat) for step in steps]
        walk.pool.take_out_full(except_=rows)
        if not all(walk.pool.put(row, step.cache) for row, step in zip(rows, steps, strict=True)):
            self._tell("a client's cache has layers of several lengths, or of other shapes or dtypes than the pool")
            return None
        return walk, rows

    def _unfit(self, step: Token) -> str | None:
        """Return why a captured walk cannot serve a token, or None."""
        length, attention, position = step.cache.get_seq_length(), step.attention, step.position
        if not length:
            return "a client's cache is empty"
        if {step.ids.dtype, position.dtype} != {torch.long} or position.device != self._device:
            return "a client's tokens or positions are not int64, or are on another device"
        if attention is not None and (attention.shape != (1, length + 1) or attention.device != self._device):
            return "a client's attention mask does not have a column for each token, or is on another device"
        if any(layer is not DynamicLayer for layer in structure(step.cache)):
            return "a client's cache is of another kind than DynamicCache"
        return None

    def _are_steady(self, seats: Sequence[Walker]) -> bool:
        """Return whether these clients have been walked together for some tokens, so that a capture pays."""
        new = [seat for seat in seats if seat not in self._rows]
        if new or self._versions != [seat.version for seat in self._rows]:
            kept = zip(self._rows, self._versions, strict=True)
            rows = [*(seat for seat, version in kept if seat.version == version and seat not in seats), *seats]
            self.forget()
            if len(rows) <= MAX_ROWS:
                self._rows, self._versions = rows, [seat.version for seat in rows]
            else:
                self._tell(f"{len(rows)} clients decode, and a captured walk has {MAX_ROWS} rows")
        self._steady += 1
        return self._steady > STEADY

    def _make(self, steps: Sequence[Token], least: int) -> CapturedWalk | None:
        """Return a walk with room for texts of ``least`` tokens. If they would take too much memory, return None and
        keep the present walk."""
        like, walk = steps[0].cache, self._walk
        rows, capacity = max(_doubled(len(self._rows)), 2), max(_doubled(least), _FIRST)
        freed = 0 if walk is None else walk.pool.bytes
        if Pool.size(like, rows, capacity) > _PART * (_free(self._device) + freed):
            self._tell(f"{rows} rows of {capacity} tokens would take more than half of the free memory")
            return None
        self._drop()
        taking_part = [step.seat for step in steps]
        # A client that pauses may have changed its adapter. It then gets a row at its next token.
        kept = [seat for seat in self._rows if seat in taking_part or seat.reading.is_current(thorough=True)]
        self._rows, self._versions = kept, [seat.version for seat in kept]
        self._walk = self._walk_in(Pool(like, rows, capacity), kept)
        return self._walk

    def _walk_in(self, pool: Pool, seats: Sequence[Walker]) -> CapturedWalk:
        clients: list[tuple[Adapted, dict[str, Slot]]] = [(seat.reading.adapted, seat.slots) for seat in seats]
        clients += [({}, {})] * (len(pool.texts) - len(seats))
        walk = CapturedWalk(self._model, self._model.adapters(clients), pool, self._here, self._requester, self._device)
        walk.kept = [tensor for seat in seats for tensor in seat.reading.tensors()]
        return walk

    def _tell(self, reason: str) -> None:
        """Log once why clients are walked without a capture."""
        if reason not in self._told:
            self._told.add(reason)
            log.info("joint walks are not captured: %s", reason)

    def forget(self) -> None:
        """Free the pool and the graph, and forget the clients' rows."""
        self._rows, self._versions, self._steady = [], [], 0
        self._drop()

    def _drop(self) -> None:
        if self._walk is not None:
            self._walk.pool.close()
            self._walk = None


def _doubled(least: int) -> int:
    """Return the smallest power of two that is at least this."""
    return 1 << (least - 1).bit_length()


def _free(device: torch.device) -> float:
    """Return the bytes of a GPU that are free, or that torch has and does not use."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)
