"""Captured walks: joint walks that a CUDA graph repeats, so that a token takes one launch instead of thousands.

A CUDA graph reads and writes fixed addresses. So each client keeps one row of a walk for as long as it decodes, and its
cache is in a :class:`~symbiosis.client.joint.pool.Pool`. Tokens, positions and lengths are copied to fixed addresses
before each walk. A client whose token a captured walk cannot serve, such as one with another kind of cache, is walked
by the model's own code. Every captured walk computes the rows of all clients. Results of clients that wait for no token
are not used. A row attends to as many tokens as its length says, and not to what lies behind them in the cache.

The base layers are part of the graph. For the executor, a captured walk is one request for all layers that runs by
itself: the policy decides when, and statistics and accounts name the clients of the walk
(docs/decisions/0042-captured-walks.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from symbiosis.modes import modes_aside

log = logging.getLogger(__name__)

MAX_ROWS = 64
"""Most rows of a walk. More clients are walked without a capture."""
STEADY = 4
"""A client takes part in captured walks after this number of tokens, multiplied by the number of times that its model
was read, as for each new adapter. A capture takes as long as several walks, and new clients and adapters need one."""
_FIRST = 256
"""Tokens that rows have room for at first. More room is made by doubling, with a new capture."""
_PART = 0.5
"""Part of the device's free memory that a pool may take."""
_ROOMY, _SHRINK = 4, 256
"""A pool is replaced after more than ``_SHRINK`` walks in a row in which its rows had ``_ROOMY`` times the room that
the longest text needs. The capture then takes about a fifth of the time of these walks."""
_TOKENS = "tokens of a client"


class Walker(Protocol):
    """A client in walks: what a :class:`~symbiosis.client.joint.decoder.Seat` has."""

    name: str
    number: int
    version: int
    slots: dict[str, Slot]

    @property
    def reading(self) -> Reading: ...


@dataclass(slots=True, eq=False)
class Step:
    """One client's next token, on its way into a walk."""

    seat: Walker
    ids: torch.Tensor
    position: torch.Tensor
    attention: torch.Tensor | None
    cache: Any
    structure: tuple[Any, ...]
    reply: asyncio.Future[Any]
    alone: str = ""
    """Why the client is to walk its own model, and then to call ``Turn.ended``."""


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
        self._tokens: dict[Walker, tuple[int, int]] = {}
        """For each client, the version of its reading, and the tokens with this version that could have been captured.
        Cleared when a client with a row leaves."""
        self._like = trials[0].cache
        """A cache whose layers have the shapes and dtypes of the model's."""
        self._walk: CapturedWalk | None = None
        self._roomy = 0
        """Latest walks in a row that have used a small part of the pool's room."""
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
        if self._model.has_experts:
            raise JointError("its code reads on the host which experts have rows")
        if self._model.latent:
            raise JointError("its cache has latent vectors, which are expanded for each token")
        if any(structure(trial.cache, 1) != (DynamicLayer,) * len(trial.cache.layers) for trial in trials):
            raise JointError("its cache has layers of other kinds than full attention")
        pool = Pool(self._like, 2 * len(trials), 2 * max(trial.cache.get_seq_length() for trial in trials))
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
        self._tokens.pop(seat, None)
        if seat in self._rows:
            self._tokens.clear()  # others may leave too
            self._versions = []  # forgets the clients' rows, at the end of a walk under way
            if not self._under_way:
                self.forget()

    async def outputs(self, steps: Sequence[Step], channel: Channel) -> dict[Step, Any]:
        """Return the outputs for the tokens that a captured walk serves. The others are to be walked without one."""
        if self.refusal is not None:
            return {}
        try:
            with modes_aside():  # which coroutines hold that wait for something else
                walk, placed = self._place(steps)
        except Exception as error:  # noqa: BLE001 (such as no memory for the pool)
            self._refuse(error)
            self.forget()
            return {}
        if walk is None:
            return {}
        tokens = [(row, step.ids, step.position, step.attention) for row, step in placed]
        parts, ids = {step.seat.name: 1 / len(placed) for _, step in placed}, walk.ids[: len(placed)]
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

        reply = self._here.submit(Call(self._key, Kind.DECODE, (ids,), parts, run))
        channel.flush()
        self._under_way = True
        try:
            await reply
            with modes_aside():
                return {} if failed else self._taken(walk, placed)
        finally:
            self._under_way = False
            if not self._versions or self.refusal is not None:
                self.forget()

    def _refuse(self, error: Exception) -> None:
        """Capture no walk from now on."""
        self.refusal = f"a walk could not be captured: {type(error).__name__}: {error}"
        log.warning("joint walks are not captured: %s", self.refusal, exc_info=error)

    def _taken(self, walk: CapturedWalk, placed: Sequence[tuple[int, Step]]) -> dict[Step, Any]:
        """Return the outputs of a walk, and count its tokens in the caches."""
        outputs: dict[Step, Any] = {}
        for row, step in placed:
            if not step.reply.done():
                walk.pool.add_token(row, step.cache)
            outputs[step] = walk.output(logits=walk.logits[row : row + 1].clone(), past_key_values=step.cache)
        return outputs

    def _place(self, steps: Sequence[Step]) -> tuple[CapturedWalk | None, list[tuple[int, Step]]]:
        """Return a captured walk, and the tokens that it can serve now, each after its row; None if it can serve
        none."""
        fit = self._choose(steps)
        if not fit or not self._give_rows([step.seat for step in fit]):
            return None, []
        least = max(step.cache.get_seq_length() for step in fit) + 1
        fits = self._walk is not None and least <= self._walk.pool.capacity and not self._is_roomy(self._walk, least)
        if not fits and not self._make(fit, least):
            return None, []
        walk = self._walk
        assert walk is not None
        rows = [self._rows.index(step.seat) for step in fit]
        walk.pool.take_out_full(except_=rows)
        placed = [(row, step) for row, step in zip(rows, fit, strict=True) if walk.pool.put(row, step.cache)]
        if len(placed) < len(fit):
            self._tell(
                "its cache has layers of several lengths, or of other shapes or dtypes than the model's", _TOKENS
            )
        return (walk if placed else None), placed

    def _is_roomy(self, walk: CapturedWalk, least: int) -> bool:
        """Return whether the pool has been too large for some time."""
        texts = [text.length for text in walk.pool.texts if text is not None]
        enough = max(_doubled(max([least, *texts])), _FIRST)
        self._roomy = self._roomy + 1 if _ROOMY * enough <= walk.pool.capacity else 0
        return self._roomy > _SHRINK

    def _choose(self, steps: Sequence[Step]) -> list[Step]:
        """Return the tokens that a captured walk is to serve.

        Clients without a row get rows together after some tokens, so that clients that begin one after another need one
        capture. A client waits for the others no longer than twice its own number of tokens.
        """
        known, usual, new = dict(zip(self._rows, self._versions, strict=True)), [], []
        others = long = False
        for step in steps:
            reason, seat = self._unfit(step), step.seat
            if reason is not None:
                self._tell(reason, _TOKENS)
                continue
            version, tokens = self._tokens.get(seat, (seat.version, 0))
            tokens = tokens + 1 if version == seat.version else 1
            self._tokens[seat] = seat.version, tokens
            enough = STEADY * seat.version
            if known.get(seat) == seat.version:
                usual.append(step)
            elif tokens > enough:
                new.append(step)
                long = long or tokens > 2 * enough
            else:
                others = True
        return usual + new if long or not others else usual

    def _unfit(self, step: Step) -> str | None:
        """Return why captured walks cannot serve a client's token, or None."""
        length, attention, position = step.cache.get_seq_length(), step.attention, step.position
        if not length:
            return "its cache is empty"
        if len(step.ids) != 1:
            return "it decodes several sequences at once"
        if step.seat.reading.runs_own_code:
            return "the code of its adapter is not known"
        if position.device != self._device:
            return "its positions are on another device"
        if position.ndim != 2:
            return "its tokens have several positions each"
        if attention is not None and (attention.shape != (1, length + 1) or attention.device != self._device):
            return "its attention mask does not have a column for each token, or is on another device"
        if any(layer is not DynamicLayer for layer in structure(step.cache, 1)):
            return "its cache is of another kind than DynamicCache"
        return None

    def _give_rows(self, seats: Sequence[Walker]) -> bool:
        """Return whether these clients have rows, each with its present adapter."""
        known = dict(zip(self._rows, self._versions, strict=True))
        if any(known.get(seat) != seat.version for seat in seats):
            rows = [*(seat for seat, version in known.items() if seat.version == version and seat not in seats), *seats]
            self.forget()
            if len(rows) > MAX_ROWS:
                self._tell(f"{len(rows)} clients decode, and a captured walk has {MAX_ROWS} rows")
                return False
            self._rows, self._versions = rows, [seat.version for seat in rows]
        return True

    def _make(self, steps: Sequence[Step], least: int) -> bool:
        """Make a walk with room for texts of ``least`` tokens, after the present one is freed, and return True. If they
        would take too much memory, keep the present walk and return False."""
        like = self._like
        rows, capacity = max(_doubled(len(self._rows)), 2), max(_doubled(least), _FIRST)
        freed = 0 if self._walk is None else self._walk.pool.bytes
        if Pool.size(like, rows, capacity) > _PART * (_free(self._device) + freed):
            self._tell(f"{rows} rows of {capacity} tokens would take more than half of the free memory")
            return False
        self._drop()
        taking_part = [step.seat for step in steps]
        # A client that pauses may have changed its adapter. It then gets a row at its next token.
        kept = [seat for seat in self._rows if seat in taking_part or seat.reading.is_current(thorough=True)]
        self._rows, self._versions = kept, [seat.version for seat in kept]
        self._walk = self._walk_in(Pool(like, rows, capacity), kept)
        return True

    def _walk_in(self, pool: Pool, seats: Sequence[Walker]) -> CapturedWalk:
        clients: list[tuple[Adapted, dict[str, Slot]]] = [(seat.reading.adapted, seat.slots) for seat in seats]
        clients += [({}, {})] * (len(pool.texts) - len(seats))
        adapters = self._model.adapters(clients, [1] * len(clients))
        walk = CapturedWalk(self._model, adapters, pool, self._here, self._requester, self._device)
        walk.kept = [tensor for seat in seats for tensor in seat.reading.tensors()]
        return walk

    def _tell(self, reason: str, what: str = "joint walks") -> None:
        """Log once why one client, or all of them, are walked without a capture."""
        if reason not in self._told:
            self._told.add(reason)
            log.info("%s are not captured: %s", what, reason)

    def forget(self) -> None:
        """Free the pool and the graph, and forget the clients' rows."""
        self._rows, self._versions = [], []
        self._drop()

    def _drop(self) -> None:
        self._roomy = 0
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
