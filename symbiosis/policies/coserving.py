"""Co-serving: inference within its SLO, and as much fine-tuning as that leaves room for (FlexLLM, sections 5 and 6).

FlexLLM fills each iteration of the model with fine-tuning tokens, s = argmax f(c, s) ≤ SLO, c inference tokens. Here an
iteration is a client's walk through the layers, each a request of its own, so the question is put for each batch,
against what is left of the tokens that are being made. The slack of a token is

    time until it is due − time that the rest of it usually takes

where "usually" is learned from earlier tokens, with the time that went to others taken out. A token is due when its
text, from its first token on, has had its SLO for each token: what one token was late, the next ones make up for, so
that it is the mean over a text that is kept. What is aimed at is less than the SLO by twice what tokens are late on
average. The least slack of all is what prefill and fine-tuning rows may cost, by a latency model that is learned as
well: beside decode rows of the same layer, where they are cheapest, or as batches of their own. Large requests are cut
to what fits (D2): forward and backward rows of fine-tuning, and prefills (chunked prefill).

Two things more, both found by measuring (docs/architecture.md). What a batch costs others is not all that it brings
about: a client in this process computes on the same cores with what it was answered, and takes from everybody what
that takes. It is learned, too, and counted as part of a batch that ends a request. And a prefill has a slack of its
own towards fine-tuning, which may not make it take half as long again: texts that have to wait for their first token
begin together, and are more then at a time than can be kept within any SLO.

With F the time spent on others since the executor started and F₀ its value when the token began, the slack is
``min(due − began − usual + F₀ − F, due − now)``; a prefill's, which is for fine-tuning only, is the same with the time
spent on fine-tuning alone. What belongs to the token does not change, so heaps know the least slack, whatever the
number of clients.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from symbiosis.core.policy import Decision, Policy, QueueView, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import UsageError
from symbiosis.policies.admission import mapping
from symbiosis.policies.latency import LONGEST_S, LatencyModel, Line
from symbiosis.policies.order import Index

__all__ = ["CoServing"]

_READ, _TUNE = 0.5, 0.2
"""Of the slack, what prefill rows and fine-tuning rows may spend at once: predictions are off by some, and others may
come meanwhile."""
_READINGS = 4
"""Prefills after which something is known of how long they take."""
_STRETCH = 1.5
"""So many times as long as usual a prefill may take for fine-tuning's sake."""
_EARLY = 0.92
"""Of an SLO, what is aimed at at most."""
_EARLIEST = 0.7
"""And at least."""
_AHEAD = 2.0
"""So many times what tokens are late on average is aimed ahead."""
_LEARN_LATE = 0.05
"""Weight of the newest token in how late they are."""
_HURRY = 0.4
"""Of the time to the first token, after which a prefill need not fit into the slack any more."""
_LEAST, _MOST = 0.5, 2.0
"""Of what is aimed at, what a token is given if its text is late, and if it is early."""
_STARVED, _PATIENCE, _CRUMB = 20.0, 2.0, 0.25
"""Of an SLO: fine-tuning that has had no slack for the first gets a batch every second that takes no longer than the
third, whatever is late. A client that computes for as long as its SLO would let nobody tune at all otherwise."""
_STARVING = "starving"
_LOST = 0.8
"""Of an SLO: a client in another process that spends so much of it there, computing or on the way, misses it whatever
is done here. Nobody waits for its sake."""
_GIVEN_UP = 2.0
"""Of an SLO, after which a client that asks for nothing is taken to have stopped in the middle of a token."""
_LEARN = 0.2
"""Weight of the newest token in what is usual."""
_FLAT = 16
"""Rows up to which a batch costs about what one row costs: fewer fine-tuning rows alone are not worth a batch."""
_UNKNOWN = 64
"""Rows of a batch of which nothing is known, and of a prefill's least chunk."""
_MAX_CLIENTS = 4096
_SLACK_ENTRIES = 64
"""Beyond two for each client, that a heap may have before what is over is taken out."""

_DECODE, _PREFILL, _FINETUNE = Kind
"""On Python 3.11 a member looked up on its class takes six times as long."""

Takes = list[tuple[Request, int]]
_Heap = list[tuple[float, int, "_Token"]]


@dataclass(slots=True, eq=False)
class _Token:
    """One inference client's walk through the model."""

    began: float
    slo: float
    due: float
    """When it should be there."""
    prefill: bool
    rows: int
    """Of its first request."""
    others: float
    """Seconds of prefill and fine-tuning before it began."""
    tuned: float
    """Seconds of fine-tuning before it began."""
    layer: int
    last: Request
    text: float
    """When the text began that it is a token of: with the first token after the prompt."""
    number: int
    """In the text, from 0."""
    patience: float
    """Seconds after which a client that asks for nothing has stopped. Not so long as it says itself: who asks for a
    loose SLO, and leaves, would keep others waiting for its token."""
    usual: bool
    """Whether it tells what a token of anybody's takes."""
    away: float = 0.0
    """Seconds in which nothing of it was here."""
    answered: float = 0.0
    """When its last request was, if it has not asked again."""
    over: bool = False

    @property
    def given_up(self) -> float:
        return self.began + self.patience


@dataclass(slots=True, eq=False)
class _Answer:
    """What a client has got, and goes on with."""

    request: Request
    at: float
    ran: float
    """Seconds of batches until then."""

    def leads_to(self, request: Request) -> bool:
        """Whether what is between the two is the client's own work on one walk, and no pause before the next one."""
        (layers, pass_, _), (after, then, _) = self.request.key, request.key
        if request.kind is not self.request.kind or pass_.is_backward > then.is_backward:
            return False
        if pass_.is_backward != then.is_backward:
            return True
        return after[0] < layers[0] if then.is_backward else after[0] > layers[0]


class CoServing(Policy):
    """Decode rows first, then prefill rows, then as many fine-tuning rows as the tightest SLO leaves time for.

    Args:
        slo_ms: time for each generated token that inference clients are promised, in milliseconds.
        ttft_ms: time to the first token, from the prefill's first request on.
        wait_ms: how long inference rows wait for others that think, so that they share a batch.
        max_wait_ms: the longest that a request is passed over, SLO or not; then it goes in the order of arrival.
        clients: (slo_ms, ttft_ms) of single clients, by name, where they are promised something else. What a client in
            this process was promised as it was made (``executor.client(slo_ms=…)``) counts more. One in another
            process can ask for more time, not for less.
    """

    name = "co-serving"

    def __init__(
        self,
        slo_ms: float = 100.0,
        ttft_ms: float = 5000.0,
        wait_ms: float = 0.2,
        max_wait_ms: float = 10_000.0,
        clients: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.slo_ms = _positive("slo_ms", slo_ms)
        self.ttft_ms = _positive("ttft_ms", ttft_ms)
        self.wait_ms = _positive("wait_ms", wait_ms)
        self.max_wait_ms = _positive("max_wait_ms", max_wait_ms)
        self.clients = {
            name: (_positive(f"slo_ms of {name!r}", slo), _positive(f"ttft_ms of {name!r}", first))
            for name, (slo, first) in _pairs(clients).items()
        }
        longest = max(self.slo_ms, *(slo for slo, _ in self.clients.values()), 0.0)
        if self.max_wait_ms < longest:
            raise UsageError(
                f"co-serving: max_wait_ms is {self.max_wait_ms:g}, less than an SLO of {longest:g}; whoever waited for "
                "so long would go in the order of arrival, whatever was promised"
            )
        self.latency = LatencyModel()
        self._decode, self._prefill, self._tuning = Index(), Index(), Index()
        self._index = {_DECODE: self._decode, _PREFILL: self._prefill, _FINETUNE: self._tuning}
        self._tokens: OrderedDict[str, _Token] = OrderedDict()
        self._usual: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Seconds that a client's token takes without prefill and fine-tuning of others, and what of them nothing of
        it was here."""
        self._anybodys = 0.0
        """The same of all clients: who begins a text finds others at work."""
        self._late = 0.0
        """Seconds by which tokens are late on average, those that are early counting as none, where others had a
        part."""
        self._others = self._tuned = 0.0
        """Seconds of prefill and fine-tuning so far, and of fine-tuning alone."""
        self._by_due: _Heap = []
        """due, of tokens"""
        self._by_room: _Heap = []
        """due − began − usual + F₀, of tokens"""
        self._prefills_by_due: _Heap = []
        """due, of prefills"""
        self._prefills_by_room: _Heap = []
        """due − began − usual + F₀, of prefills; with the time spent on fine-tuning, and a due of its own"""
        self._reading = Line()
        """Seconds that a prefill takes without fine-tuning, by its rows."""
        self._own = {_PREFILL: LatencyModel(), _FINETUNE: LatencyModel()}
        """Seconds that a client in this process computes with an answer, by its key and rows."""
        self._answered: OrderedDict[str, _Answer] = OrderedDict()
        """To clients in this process, the last; until they ask again."""
        self._last_tuned = -math.inf
        """When fine-tuning last ran because there was time for it."""
        self._now = 0.0
        """When the batch that runs, or ran last, was decided on."""
        self._ran = 0.0
        """Seconds of batches so far."""

    def default_terms(self, client: str) -> Terms:
        slo_ms, ttft_ms = self.clients.get(client, (self.slo_ms, self.ttft_ms))
        return Terms(slo_ms=slo_ms, ttft_ms=ttft_ms)

    def unloaded(self, seconds: float) -> None:
        promises = {"slo_ms": self.slo_ms, "ttft_ms": self.ttft_ms}
        for name, (slo, first) in self.clients.items():
            promises |= {f"slo_ms of {name!r}": slo, f"ttft_ms of {name!r}": first}
        for what, promised in promises.items():
            if promised < 1e3 * seconds:
                raise UsageError(
                    f"co-serving: {what} is {promised:g}, but a token takes {1e3 * seconds:.3g} ms in base layers "
                    "alone when nothing else goes on; promise more"
                )
        shortest = min(self.slo_ms, *(slo for slo, _ in self.clients.values()), math.inf)
        if self.wait_ms > shortest:
            raise UsageError(f"co-serving: wait_ms is {self.wait_ms:g}, more than an SLO of {shortest:g}; wait less")

    # ---------------------------------------------------------------------------------------------------------- tokens

    def submitted(self, request: Request) -> None:
        self._index[request.kind].add(request)
        answer = self._answered.pop(request.client, None)
        if answer is not None and answer.leads_to(request):
            own = request.arrived - answer.at - (self._ran - answer.ran)
            self._own[request.kind][answer.request.key].learn(answer.request.rows, own)
        if request.kind is _FINETUNE:
            return
        token = self._tokens.get(request.client)
        layer = request.key.layers[0]
        if token is None or token.over or layer <= token.layer or token.prefill != (request.kind is _PREFILL):
            follows = token is not None and self._learn(request, token)
            token = self._begin(request, token if follows else None)
        if token.answered:
            token.away += max(request.arrived - token.answered, 0.0)
            token.answered = 0.0
        token.layer, token.last = layer, request

    def _learn(self, request: Request, token: _Token) -> bool:
        """How long a token took; whether this request is for the next one of the same text."""
        token.over = True
        if token.prefill and request.kind is _DECODE:
            self._reading.learn(token.rows, request.arrived - token.began - (self._tuned - token.tuned))
        own = request.arrived - token.began - (self._others - token.others)
        if token.prefill or request.kind is _PREFILL or not 0 < own <= 2 * token.patience:
            return False  # that was a pause between two requests of a user, and no token
        client = request.client
        if token.answered:
            token.away += max(request.arrived - token.answered, 0.0)
        before, away = self._usual.pop(client, (own, token.away))
        if len(self._usual) >= _MAX_CLIENTS:
            self._usual.popitem(last=False)
        self._usual[client] = (1 - _LEARN) * before + _LEARN * own, (1 - _LEARN) * away + _LEARN * token.away
        if token.usual:
            self._anybodys = (1 - _LEARN) * self._anybodys + _LEARN * own
        if token.usual and self._others > token.others:
            self._late += _LEARN_LATE * (max(request.arrived - token.due, 0.0) - self._late)
        return True

    def _begin(self, request: Request, before: _Token | None) -> _Token:
        client, now = request.client, request.arrived
        terms = request.terms
        slo_ms, ttft_ms = terms.slo_ms or self.slo_ms, terms.ttft_ms or self.ttft_ms
        prefill = request.kind is _PREFILL
        slo = (ttft_ms if prefill else slo_ms) / 1e3
        aim = max(_EARLY * slo - _AHEAD * self._late, _EARLIEST * slo)
        text, number = (before.text, before.number + 1) if before else (now, 0)
        due = min(max(text + (number + 1) * aim, now + _LEAST * aim), now + _MOST * aim)
        promised = (self.ttft_ms if prefill else self.slo_ms) / 1e3
        patience = _GIVEN_UP * (slo if request.local else min(slo, promised))
        usual, away = self._usual.get(client, (0.0, 0.0))
        lost = not request.local and away >= _LOST * slo
        usual_one = not lost and (request.local or slo <= promised)
        token = _Token(
            began=now,
            slo=slo,
            due=due,
            prefill=prefill,
            rows=request.rows,
            others=self._others,
            tuned=self._tuned,
            layer=-1,
            last=request,
            text=text,
            number=number,
            patience=patience,
            usual=usual_one,
        )
        if client not in self._tokens and len(self._tokens) >= _MAX_CLIENTS:
            self._tokens.popitem(last=False)[1].over = True
        self._tokens[client] = token
        if prefill:
            heapq.heappush(self._prefills_by_due, (due, request.id, token))
        elif not lost:
            heapq.heappush(self._by_due, (due, request.id, token))
            usual = max(usual, self._anybodys) or slo / 2
            heapq.heappush(self._by_room, (due - now - usual + self._others, request.id, token))
        if prefill and self._reading.count >= _READINGS and usual_one:
            usual = self._reading.predict(request.rows)
            room = min(due - now, _STRETCH * usual) - usual
            heapq.heappush(self._prefills_by_room, (room + self._tuned, request.id, token))
        # Tokens that are over fall out at the top. Below one client's tight SLO those of others would never get there.
        for heap in (self._by_due, self._by_room, self._prefills_by_due, self._prefills_by_room):
            if len(heap) > 2 * len(self._tokens) + _SLACK_ENTRIES:
                heap[:] = [entry for entry in heap if not entry[2].over]
                heapq.heapify(heap)
        return token

    def slack(self, now: float, kind: Kind = _PREFILL) -> float:
        """Seconds for prefill rows that no token being made would miss, or for fine-tuning rows that no prefill would
        miss either; ``inf`` if nothing is being made, ≤ 0 if something is late."""
        slack = min(self._least(self._by_due, now) - now, self._least(self._by_room, now) - self._others)
        if kind is _FINETUNE:
            slack = min(slack, self._least(self._prefills_by_due, now) - now)
            slack = min(slack, self._least(self._prefills_by_room, now) - self._tuned)
        return slack

    def _least(self, heap: _Heap, now: float) -> float:
        while heap and self._is_over(heap[0][2], now):
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    @staticmethod
    def _is_over(token: _Token, now: float) -> bool:
        """Whether nothing can be said for it any more: its client is at the next, or has stopped."""
        waits = token.last.remaining and not token.last.cancelled
        if not token.over and not waits and token.given_up <= now:
            token.over = True
        return token.over

    def ran(self, batch: Batch, seconds: float) -> None:
        line = self.latency[batch.key]
        if 0 < seconds < LONGEST_S:
            decode, prefill, tuning = _rows_of(batch)
            served = decode + prefill
            tuned = seconds - (line.predict(served) if served else 0.0) if tuning else 0.0
            others = seconds - (line.predict(decode) if decode else 0.0) if prefill + tuning else 0.0
            self._tuned += max(tuned, 0.0)
            if tuning and batch.reason != _STARVING:
                self._last_tuned = self._now
            self._others += max(others, tuned, 0.0)
            self._ran += seconds
            for request, _, stop in batch.slices:
                if stop < request.rows or request.done == request.rows:  # or answered long ago, as on a GPU
                    continue
                if request.kind is _DECODE:
                    if (token := self._tokens.get(request.client)) is not None:
                        token.answered = self._now + seconds
                elif request.local:
                    self._answers(request, self._now + seconds)
        line.learn(batch.rows, seconds)

    def _answers(self, request: Request, now: float) -> None:
        """A client in this process gets an answer, and goes on with it on the cores that everybody uses."""
        own = self.own(request)
        self._others += own
        if request.kind is _FINETUNE:
            self._tuned += own
        if len(self._answered) >= _MAX_CLIENTS:
            self._answered.popitem(last=False)
        self._answered[request.client] = _Answer(request, now, self._ran)

    def own(self, request: Request) -> float:
        """Seconds that the client of a prefill's or a fine-tuning request will take from everybody once it is answered:
        none, if it is in another process."""
        return self._own[request.kind][request.key].predict(request.rows) if request.local else 0.0

    # ------------------------------------------------------------------------------------------------------- decisions

    def decide(self, view: View, now: float) -> Decision:
        self._now = now
        oldest = view.oldest
        overdue = oldest.arrived + self.max_wait_ms / 1e3
        if overdue <= now:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        decode, prefill = self._decode.furthest_behind(), self._prefill.furthest_behind()
        tuning = self._tuning.furthest_behind()
        first = decode or prefill
        if first is None:
            assert tuning is not None
            return self._tune(tuning, view, now, overdue)
        slo = self.slo_ms / 1e3
        if tuning is not None and now >= max(tuning.arrived + _PATIENCE * slo, self._last_tuned + _STARVED * slo):
            rows = self._rows_within(tuning.key, 0, _CRUMB * slo, view.max_rows)
            takes = view.queues[tuning.key].take(max(rows, min(_FLAT, view.max_rows)), first=tuning)
            return Run(tuning.key, takes, _STARVING)
        if decode is not None and prefill is not None and decode.key != prefill.key:
            tuning = None  # fine-tuning waits while a prefill does
            alone = view.queues[prefill.key]
            rows = self._rows_within(prefill.key, 0, _READ * self.slack(now), view.max_rows)
            hurry = self._in_a_hurry(prefill.client, now)
            if hurry or rows >= min(alone.rows, self._worth_a_batch(prefill.key)):
                rows = max(rows, min(_UNKNOWN, view.max_rows))
                return Run(prefill.key, self._with_inference(alone, rows, now), "hurry" if hurry else "prefill")
        if tuning is not None and first.key != tuning.key:
            # It need not wait for a moment without inference, which under load never comes: time is what counts.
            alone = view.queues[tuning.key]
            seconds = _TUNE * self.slack(now, _FINETUNE) - self.own(tuning)
            rows = self._rows_within(tuning.key, 0, seconds, view.max_rows)
            if rows >= min(alone.rows, self._worth_a_batch(tuning.key)):
                return Run(tuning.key, alone.take(rows), "budget")
        due = first.arrived + self.wait_ms / 1e3
        if due > now and view.thinking:
            return Wait(due)
        takes = self._with_inference(view.queues[first.key], view.max_rows, now)
        mixed = takes[-1][0].kind is _FINETUNE
        return Run(first.key, takes, "co-served" if mixed else "inference")

    def _in_a_hurry(self, client: str, now: float) -> bool:
        token = self._tokens.get(client)
        return token is not None and token.prefill and now > token.began + _HURRY * token.slo

    def _tune(self, tuning: Request, view: View, now: float, overdue: float) -> Decision:
        """Nothing but fine-tuning is queued."""
        queue = view.queues[tuning.key]
        slack = _TUNE * self.slack(now, _FINETUNE) - self.own(tuning)
        if not view.thinking:  # nobody can come but who begins a pass: a little is always right
            slack = max(slack, _CRUMB * self.slo_ms / 1e3)
        rows = self._rows_within(queue.key, 0, min(slack, self.slo_ms / 1e3), view.max_rows)
        if rows < min(queue.rows, self._worth_a_batch(queue.key)) and slack < math.inf:
            if view.thinking:
                until = [heap[0][2].given_up for heap in (self._by_due, self._prefills_by_due) if heap]
                return Wait(max(min(*until, overdue), now + 1e-4))
            rows = max(rows, min(_FLAT, view.max_rows))
        return Run(queue.key, queue.take(max(rows, 1)), "budget" if rows < min(queue.rows, view.max_rows) else "all")

    def _worth_a_batch(self, key: Key) -> int:
        """Rows from which on a batch spends no more than half of its time on what any batch costs."""
        start, slope = self.latency[key].coefficients
        return max(_FLAT, math.ceil(min(start / slope, 1e9))) if slope > 0 else _FLAT

    def _with_inference(self, queue: QueueView, max_rows: int, now: float) -> Takes:
        """All decode rows, and of prefill and fine-tuning what the slack has time for."""
        key, takes = queue.key, Takes()
        rows = self._take(queue, _DECODE, max_rows, takes)
        if rows < max_rows and key in self._prefill:
            most = self._rows_within(key, rows, _READ * self.slack(now), max_rows)
            least = 0 if rows else min(_UNKNOWN, max_rows)
            rows += self._take(queue, _PREFILL, max(most - rows, least), takes)
        if rows < max_rows and key in self._tuning:
            tuning = next(self._tuning.of(key))
            seconds = _TUNE * self.slack(now, _FINETUNE) - self.own(tuning)
            self._take(queue, _FINETUNE, self._rows_within(key, rows, seconds, max_rows) - rows, takes)
        return takes or queue.take(max_rows)  # nothing but fine-tuning, which a client has put in front of inference

    def _take(self, queue: QueueView, kind: Kind, most: int, takes: Takes) -> int:
        """Add up to ``most`` rows of a kind; how many. Of each client its first request alone, as those of one client
        stay in order, whatever their kinds."""
        left = most
        if left > 0 and queue.key in self._index[kind]:
            for request in self._index[kind].of(queue.key):
                if queue.of(request.client)[0] is request:
                    count = min(request.rows - request.taken, left)
                    takes.append((request, count))
                    left -= count
                    if not left:
                        break
        return most - left

    def _rows_within(self, key: Key, rows: int, seconds: float, most: int) -> int:
        """Rows of a batch that takes ``seconds`` longer than one of ``rows``."""
        if seconds <= 0:
            return rows
        if seconds == math.inf:
            return most
        line = self.latency[key]
        if not line.count:
            return min(max(rows, _UNKNOWN), most)
        return max(rows, line.rows_within((line.predict(rows) if rows else 0.0) + seconds, most))

    def __repr__(self) -> str:
        return f"CoServing(slo_ms={self.slo_ms}, ttft_ms={self.ttft_ms}, max_wait_ms={self.max_wait_ms})"


def _rows_of(batch: Batch) -> tuple[int, int, int]:
    """Of decode, prefill and fine-tuning."""
    decode = prefill = tuning = 0
    for request, start, stop in batch.slices:
        kind = request.kind
        if kind is _DECODE:
            decode += stop - start
        elif kind is _PREFILL:
            prefill += stop - start
        else:
            tuning += stop - start
    return decode, prefill, tuning


def _pairs(clients: Mapping[str, tuple[float, float]] | None) -> Mapping[str, tuple[float, float]]:
    """What was promised to single clients, if it has the right form."""
    for name, pair in mapping("co-serving", "clients", clients, tenants=False).items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise UsageError(
                f"co-serving: clients has {pair!r} for {name!r}; give (slo_ms, ttft_ms), on a command line "
                f"clients.{name}=50/900"
            )
    return clients or {}


def _positive(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UsageError(f"co-serving: {what} is {value!r}; it must be a number of milliseconds greater than 0")
    return float(value)
