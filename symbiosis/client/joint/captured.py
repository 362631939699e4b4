"""Captured walks: joint walks that a CUDA graph repeats, so that a token takes one launch instead of thousands.

A CUDA graph reads and writes fixed addresses. So each client keeps one row of a walk for as long as it decodes, its
cache is in a :class:`~symbiosis.client.joint.pool.Pool`, and tokens, positions and lengths are copied to fixed
addresses before each walk. The rows of clients that do not take part are computed too, and their results are not used.
A row attends to as many tokens as its length says; the rest of the row is zero.

The base layers are part of the graph. For the executor, a captured walk is one request for all layers that runs by
itself: the policy decides when, and statistics and accounts name the clients of the walk. While a client fine-tunes,
walks are not captured, so that the policy decides layer by layer (docs/decisions/0042-captured-walks.md).

Legend: R rows; N ≤ R clients that take part; H heads, of which G share keys; L tokens of a row; D features of a head.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function

from symbiosis.client.joint import Here
from symbiosis.client.joint.adapters import Adapted
from symbiosis.client.joint.attention import JointError, structure
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


def can_capture(device: torch.device) -> bool:
    """Return whether walks on a device can be captured."""
    return device.type == "cuda"


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
                self._forget()

    async def outputs(self, steps: Sequence[Token], channel: Channel) -> list[Any] | None:
        """Return the outputs for the tokens of several clients; None if they are to be walked without a capture."""
        try:
            placed = self._place(steps)
        except Exception as error:  # noqa: BLE001 (such as no memory for the pool)
            self._refuse(error)
            self._forget()
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
                if not was_run:
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
                self._forget()

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
        if self.refusal is not None or not self._are_steady([step.seat for step in steps]) or self._here.finetunes():
            return None
        for reason in filter(None, map(self._unfit, steps)):
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
            self._tell("a client's cache has layers of several lengths")
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
            self._forget()
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

    def close(self) -> None:
        """Free the pool and the graph."""
        self._forget()

    def _tell(self, reason: str) -> None:
        """Log once why clients are walked without a capture."""
        if reason not in self._told:
            self._told.add(reason)
            log.info("joint walks are not captured: %s", reason)

    def _forget(self) -> None:
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


class CapturedWalk:
    """One walk of R rows, each with the adapter of one client.

    Args:
        model: the joint model.
        adapters: the adapters of the rows, from :meth:`JointModel.adapters`.
        pool: has the caches of the rows.
        here: runs base layers.
        requester: the requester of the joint model's layers.
        device: the model's device.

    Attributes:
        ids: tokens [R, 1].
        logits: of the latest walk, [R, 1, vocabulary].
        output: class of the model's output.
        layers: the base layers that the walk goes through.
        was_run: whether it has run. An error of a later run is that of one token, such as a position out of range.
    """

    def __init__(
        self,
        model: JointModel,
        adapters: Mapping[str, Any],
        pool: Pool,
        here: Here,
        requester: Requester,
        device: torch.device,
    ) -> None:
        rows = len(pool.texts)
        self.pool = pool
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.logits = torch.empty(0, device=device)
        self.output: type[Any] = object
        self.layers: set[int] = set()
        self.widths: set[int] = set()
        """Widths of the rows that base layers take."""
        self.kept: list[torch.Tensor] = []
        """The adapters' values, whose memory the graph reads whatever their clients do."""
        self._positions = torch.zeros_like(self.ids)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._seen = torch.ones(rows, pool.capacity, dtype=torch.bool, device=device)
        """Which tokens of each row its client's attention mask lets the next token see."""
        self._masked: set[int] = set()
        """Rows whose clients have given a mask."""
        self._none = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._cache = _PooledCache(pool, self._lengths, self._seen)
        self._model = model
        self._adapters = adapters
        self._here = here
        self._requester = requester
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.was_run = False

    def place(self, tokens: Sequence[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        """Take the next tokens: row, id [1, 1], position [1, 1], and mask [1, length + 1] or None."""
        ids, positions = [self._none] * len(self.ids), [self._none] * len(self.ids)
        for row, token, position, attention in tokens:
            ids[row], positions[row] = token, position
            if attention is not None:
                self._seen[row, : attention.shape[1]].copy_(attention[0])
                self._masked.add(row)
            elif row in self._masked:
                self._seen[row].fill_(True)
                self._masked.discard(row)
        torch.cat(ids, out=self.ids)
        torch.cat(positions, out=self._positions)
        lengths = [0 if text is None else text.length for text in self.pool.texts]
        self._lengths.copy_(torch.tensor(lengths), non_blocking=True)

    def run(self) -> None:
        """Walk: the first time by the model's own code, which is captured, and then by the graph."""
        if not can_capture(self._device):
            self.compute()
        else:
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
        self.was_run = True

    def _capture(self) -> torch.cuda.CUDAGraph:
        now, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what a collector frees may wait for the device, which would end the capture
        side.wait_stream(now)
        try:
            with torch.cuda.stream(side):
                self.compute()  # libraries allocate at their first call
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.compute()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # which the first error has caused
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            now.wait_stream(side)
            if collects:
                gc.enable()
        return graph

    def compute(self) -> None:
        """Walk by the model's own code."""
        with self._model.seated(self._adapters), self._requester.answered_by(self._answer):
            out = self._model.forward(self._cache, self.ids, self._positions)
        self.logits, self.output = out.logits, type(out)

    def _answer(self, call: Call) -> Results:
        self.layers.update(call.key.layers)
        self.widths.add(call.tensors[0].shape[1])
        return self._here.compute(call)


class _PooledCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of a walk whose rows are in a pool, and its attention.

    Args:
        pool: has the keys and values.
        lengths: tokens [R] of each row before this one.
        seen: which tokens [R, L] each row may see.
    """

    def __init__(self, pool: Pool, lengths: torch.Tensor, seen: torch.Tensor) -> None:
        self.layers = [DynamicLayer() for _ in pool.keys]  # for code that asks for kinds of layers
        self.layer_class_to_replicate = None
        self.offloading = False
        self._pool = pool
        self._lengths = lengths
        self._seen = seen
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self._columns = torch.arange(pool.capacity, device=lengths.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [R, H, 1, D] behind those of each row, and return the pool's."""
        keys, values = self._pool.keys[layer_idx], self._pool.values[layer_idx]
        keys[self._rows, :, self._lengths] = key_states[:, :, 0]
        values[self._rows, :, self._lengths] = value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1  # not the same for all rows: the model gets positions

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._pool.capacity, 0

    def mask(self, given: Mapping[str, Any]) -> torch.Tensor:
        """Return what to add to scores, [R, 1, 1, L]: 0 for tokens that a row may see, -inf for others."""
        if given.get("mask_function") is not causal_mask_function:
            raise JointError("its attention does not see all earlier tokens")
        seen = self._seen & (self._columns <= self._lengths[:, None])
        scores = torch.zeros(seen.shape, dtype=given["dtype"], device=seen.device)
        return scores.masked_fill_(~seen, -math.inf)[:, None, None]

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """Return the attention of queries [R, H, 1, D] over the pool: [R, 1, H, D].

        The heads that share keys are rows of one product, so the keys are not repeated for them.
        """
        rows, heads, _, features = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], features)
        mask = mask.expand(rows, 1, grouped.shape[2], key.shape[2])
        found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=options.get("scaling"))
        return found.reshape(rows, 1, heads, value.shape[3])
