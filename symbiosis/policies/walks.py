"""Walks and texts: when each token and each prompt is due, and how long other work may delay them.

A *text* is what one client decodes after a prompt. Its SLO is a mean, so its nth token is due n · ``AIM`` · SLO after
the first one. A walk, here, is that for one token or one prompt: it ends with the answer of the last layer, or where
the next one begins (:mod:`symbiosis.policies.starts`).

Let F be the seconds that the executor has spent on prompts and fine-tuning so far, and F₀ its value when the walk of a
token began. ``due − began − usual − (F − F₀)`` is the token's *slack*, where ``usual`` is the time that the walk takes
without such work. All of it but F stays the same during the walk, so a heap knows the least slack of all tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from symbiosis.core.clients import STOPPED_S
from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind, tenant_of
from symbiosis.policies.latency import Fit

AIM = 0.92
"""Part of the SLO for which tokens are scheduled. The rest is for errors of the learned costs."""
_LEAST = 0.25
"""Part of the SLO that fine-tuning may take from each token of a text that misses its SLO."""
_SHARE = 0.1
"""Ratio of fine-tuning's time to prompts' time while each queued prompt has at least half of its target left."""
_AWAY = 0.8
"""Part of the SLO: if a client in another process computes for so long per token, its tokens delay no other work."""
_LEARN = 0.2  # weight of the newest token in the usual time of a token
_MAX_CLIENTS = 4096
_PREFILL = Kind.PREFILL  # on Python 3.11 a member looked up on its class takes six times as long


@dataclass(slots=True, eq=False)
class Walk:
    """The prefill of a prompt, or one token of one or several texts. For the scheduler, a whole call of ``generate``
    may be one walk."""

    first: Request
    last: Request
    due: float
    others: float  # time spent on prompts and fine-tuning before it began (F₀)
    patience: float  # time after ``seen`` from which a client without a queued request counts as stopped
    seen: float  # time of the latest request or answer
    away: float = 0.0  # time during which the client had no request here
    spent: float = 0.0  # time that the executor has spent on a prompt
    ttft: float = 0.0  # target of a prompt
    rank: tuple[bool, float] = (False, 0.0)  # place in the order in which prompts run
    over: bool = False

    def ended(self, now: float) -> bool:
        """Return whether the walk has ended, or its client has stopped."""
        self.over = self.over or (self.seen + self.patience <= now and not _queued(self.last))
        return self.over


@dataclass(slots=True, eq=False)
class KnownClient:
    """What is known of a client: the text that it decodes, and the usual time of its tokens."""

    slo: float  # longest mean time from one token of the text to the next
    began: float = math.inf  # time of the first token, which the prompt yields; inf before it
    tokens: int = 0  # tokens after the first one whose walk has begun
    late: bool = False  # whether the first token was late, so that the text has missed its SLO
    usual: float = 0.0  # usual time of a token without prompts and fine-tuning; 0 before the first one
    away: float = 0.0  # the part of it in which the client has no request here
    walk: Walk | None = None  # the latest one, which may be over
    kept: int = 0  # tokens, the first one of a text included, that were made in time, by the mean over their text
    missed: int = 0  # tokens that were made later

    def made(self, in_time: bool) -> None:
        """Count a token."""
        if in_time:
            self.kept += 1
        else:
            self.missed += 1

    def may_keep(self, now: float, usual: float) -> bool:
        """Return whether the text may keep its SLO if its next token begins now. It is assumed to have as many tokens
        left as have begun. Each of them gains the SLO less the usual time of a token."""
        late = now + usual - self.began - self.tokens * self.slo
        return not self.late and late <= max(self.tokens * (self.slo - usual), 0.0)


Heap = list[tuple[float, int, Walk]]


class Walks:
    """The walks of all inference clients. ``slo_s`` and ``ttft_s`` are the targets of clients without their own."""

    def __init__(self, slo_s: float, ttft_s: float) -> None:
        self._slo_s, self._ttft_s = slo_s, ttft_s
        self._others = 0.0  # time spent on prompts and fine-tuning so far (F)
        self._usual_s = 0.0  # usual time of a token of any client
        self._clients: OrderedDict[str, KnownClient] = OrderedDict()
        self._by_text: Heap = []  # tokens by the slack that their texts allow, plus F
        self._by_token: Heap = []  # tokens by the slack that their own SLOs allow, plus F
        self._before: dict[str, tuple[int, int]] = {}  # tokens of forgotten clients, kept and missed, by tenant
        self._last_layer = 0  # of the walks that have ended; 0 before the first one
        self._prompts: dict[str, Walk] = {}  # prompts under way, by client
        self._reading: OrderedDict[str, Walk] = OrderedDict()  # those without their last request, in order of begin
        self._last: deque[Request] = deque()  # the last requests of the others
        self._cost = Fit()  # time that the executor spends on a prompt, by its rows
        self._queue: list[tuple[tuple[bool, float], int, Request]] = []  # requests of prompts, by rank
        self._most = 64  # length of the queue from which requests that have run are removed
        self._ordered, self._changes = -math.inf, 0  # time at which the prompts were ordered, and changes since
        self._left = 1.0  # part of the time that tokens leave to prompts
        self._share = 0.0  # time that fine-tuning may take before queued prompts
        self._between, self._until = math.inf, 0.0  # least slack of a text's next token, and until when that holds
        self._spare = math.inf  # time that fine-tuning may take before a prompt is late
        self._half = math.inf  # the same before one has less than half of its target left

    def submitted(self, request: Request, begins: bool) -> None:
        """Note a request of an inference client, and whether it begins a walk."""
        client, prefill = self._client(request.client, request), request.kind is _PREFILL
        walk = client.walk
        if walk is None or begins:
            if walk is not None:
                self._end(client, walk, request)
            walk = client.walk = (self._begin_prompt if prefill else self._begin_token)(client, request)
        walk.away += request.arrived - walk.seen
        walk.last, walk.seen = request, request.arrived
        if prefill and request.rows < walk.first.rows and request.key.layers[-1] == self._last_layer:
            self._reading.pop(request.client, None)
            self._last.append(request)
        elif prefill:
            heapq.heappush(self._queue, (walk.rank, request.id, request))
            if len(self._queue) > self._most:  # requests that have run stay until they come first
                self._queue = [entry for entry in self._queue if _queued(entry[2])]
                heapq.heapify(self._queue)
                self._most = 2 * len(self._queue) + 64

    def is_over(self, client: str) -> bool:
        """Return whether the latest walk of a client is known to have ended."""
        known = self._clients.get(client)
        return known is not None and known.walk is not None and known.walk.over

    def spent(self, client: str, seconds: float) -> None:
        """Note the time that the executor spent on a client's prompt, or on its fine-tuning."""
        self._others += seconds
        if client in self._prompts:
            self._prompts[client].spent += seconds
            self._share = min(self._share + _SHARE * seconds, AIM * self._slo_s)
        else:
            self._share = max(self._share - seconds, 0.0)
            self._spare -= seconds
            self._half -= seconds

    def started(self, request: Request, at: float) -> None:
        """Note that a batch has started that answers a request at time ``at``."""
        client = self._clients.get(request.client)
        if client and client.walk and client.walk.last is request:
            client.walk.seen = at

    def answered(self, request: Request) -> None:
        """Note that a batch has run that answered a request. On a GPU, the client may have sent the next one since."""
        client = self._clients.get(request.client)
        if client and client.walk and client.walk.last is request:
            client.walk.over = request.key.layers[-1] == self._last_layer > 0
            if client.walk.over:
                self._end_prompt(request.client, client.walk.seen)

    def slack(self, kind: Kind, now: float) -> float:
        """Return the time that prompts, or fine-tuning, may take; ``inf`` if nothing is due, ≤ 0 if a token is late.
        Fine-tuning does not use what texts have gained before, which is kept for prompts to come."""
        first = _first(self._by_text if kind is _PREFILL else self._by_token, now)
        slack = math.inf if first is None else first[0] - self._others
        if kind is _PREFILL:
            return slack
        share = math.inf
        if self.first_prompt(now) or self._last:
            share = self._share if self._half > 0 else 0.0  # more prompts may come
        between = self._between if now < self._until else AIM * self._slo_s  # a text may begin its next token
        return min(slack, between, share, self._spare)

    def next_look(self, now: float) -> float:
        """Return when to look again, if no request comes: when a client whose token has the least slack counts as
        stopped, or when no text is expected to begin its next token. Prompts may have stopped too, so one SLO is the
        longest time until then."""
        tops = (_first(heap, now) for heap in (self._by_text, self._by_token))
        stops = [top[2].seen + top[2].patience for top in tops if top]
        if self._last and self._reading:  # a last request may wait until this client has been silent for one SLO
            silent = next(iter(self._reading.values())).seen + self._slo_s
            stops += [silent] if silent > now else []
        return min(*stops, self._until if now < self._until else math.inf, now + self._slo_s)

    def first_prompt(self, now: float) -> Request | None:
        """Return the queued request of the prompt that comes first.

        The last request of a prompt, for one row of the head, waits for prompts that were under way when it came, if
        the next tokens of its text would delay them by more, in sum, than it waits. It waits only while all these
        prompts have more than half of their targets left, and no text decodes.
        """
        if self._changes * 8 > len(self._prompts) or (self._prompts and now > self._ordered + self._slo_s):
            self._order(now)
        while self._last and not _queued(self._last[0]):
            self._last.popleft()
        if self._last and (self._half <= 0 or now < self._until or not self._delays(self._last[0].arrived, now)):
            return self._last[0]
        while self._queue and not _queued(self._queue[0][2]):
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    @property
    def waits(self) -> bool:
        """Whether last requests of prompts wait for other prompts."""
        return bool(self._last)

    def _delays(self, before: float, now: float) -> bool:
        """Return whether the tokens of a text would delay the prompts under way by more, in sum, than these take. The
        one that began first must have begun before a time, must not be left out, and has a request queued or had one
        within the last SLO. Of prompts whose last request has come, there is nothing to delay."""
        while self._reading:
            client, walk = next(iter(self._reading.items()))
            if not walk.ended(now):
                active = now < walk.seen + self._slo_s or _queued(walk.last)
                first = active and walk.first.arrived < before and not walk.rank[0]
                return first and len(self._reading) * (1 - self._left) > self._left
            del self._reading[client]
        return False

    def slo(self) -> dict[str, tuple[int, int]]:
        """Return how many tokens of each client were made in time, and how many later.

        Those of a tenant's forgotten clients are under ``tenant/``, or under "" if there are too many tenants. The last
        token of a text is not counted: only the next one would tell when the client has made it.
        """
        return self._before | {name: (client.kept, client.missed) for name, client in self._clients.items()}

    def _client(self, name: str, request: Request) -> KnownClient:
        """Return what is known of a client. If there are too many, the one is forgotten that was silent for longest."""
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = KnownClient(self._slo_s)
        self._clients.move_to_end(name)
        if name == request.client:
            client.slo = (request.terms.slo_ms or 1e3 * self._slo_s) / 1e3
        if len(self._clients) > _MAX_CLIENTS:
            name, forgotten = self._clients.popitem(last=False)
            self._prompts.pop(name, None)
            self._reading.pop(name, None)
            tenant = f"{tenant_of(name)}/"
            if tenant not in self._before and len(self._before) >= _MAX_CLIENTS:
                tenant = ""
            kept, missed = self._before.get(tenant, (0, 0))
            self._before[tenant] = kept + forgotten.kept, missed + forgotten.missed
        return client

    def _begin_prompt(self, client: KnownClient, request: Request) -> Walk:
        now, ttft = request.arrived, (request.terms.ttft_ms or 1e3 * self._ttft_s) / 1e3
        client.began, client.tokens, client.late = math.inf, 0, False
        walk = Walk(request, request, now + ttft, self._others, STOPPED_S, now, ttft=ttft)
        self._prompts[request.client] = self._reading[request.client] = walk
        self._reading.move_to_end(request.client)
        walk.rank = False, walk.due
        self._changes += 1
        return walk

    def _begin_token(self, client: KnownClient, request: Request) -> Walk:
        now, slo = request.arrived, client.slo
        usual = client.usual or self._usual_s or slo / 2
        kept = []
        for name in request.clients:
            self._end_prompt(name, now)
            text = self._client(name, request)
            text.began = min(text.began, now)
            if text.tokens:  # its next token begins when the latest one is made
                text.made(now <= text.began + text.tokens * text.slo)
            text.tokens += 1
            if text.may_keep(now, usual):
                kept.append(text)
        due = min((text.began + text.tokens * AIM * text.slo for text in kept), default=now + usual + AIM * slo)
        own = min((now + AIM * text.slo for text in kept), default=now + usual + _LEAST * slo)
        walk = Walk(request, request, due, self._others, 2 * self._slo_s, now)
        if request.local or client.away < _AWAY * slo:
            if own - now - usual <= self._between or now >= self._until:
                self._between, self._until = own - now - usual, now + 2 * self._slo_s
            for heap, end in (self._by_text, due), (self._by_token, min(due, own)):
                heapq.heappush(heap, (end - now - usual + self._others, request.id, walk))
                if len(heap) > 2 * len(self._clients) + 64:  # one that stays at the top keeps those below it
                    heap[:] = [entry for entry in heap if not entry[2].over]
                    heapq.heapify(heap)
        return walk

    def _end(self, client: KnownClient, walk: Walk, request: Request) -> None:
        """End a walk at its client's next request, and learn from it."""
        walk.over = True
        self._last_layer = max(self._last_layer, walk.last.key.layers[-1])
        self._end_prompt(request.client, request.arrived)
        seconds = request.arrived - walk.first.arrived - (self._others - walk.others)
        if _PREFILL not in (walk.first.kind, request.kind) and 0 < seconds <= 2 * walk.patience:  # or it is a pause
            client.away += _LEARN * (walk.away - client.away)
            client.usual += _LEARN * (seconds - client.usual) if client.usual else seconds
            self._usual_s += _LEARN * (seconds - self._usual_s) if self._usual_s else seconds

    def _end_prompt(self, name: str, now: float) -> None:
        """End a client's prompt, if there is one under way: its first token is made."""
        walk = self._prompts.pop(name, None)
        self._reading.pop(name, None)
        if walk is not None:
            walk.over = True
            self._cost.learn(walk.first.rows, walk.spent)
            client = self._client(name, walk.first)
            client.began, client.late = now, now > walk.due
            client.made(not client.late)
            self._changes += 1

    def _order(self, now: float) -> None:
        """Order the prompts so that most of them meet their targets (Moore and Hodgson, 1968): the earliest target
        first and, wherever one would be missed, without the longest prompt so far. Those that are left out come last,
        in the order of arrival. Tokens take a part of the time meanwhile."""
        self._ordered, self._changes = now, 0
        self._prompts = {client: walk for client, walk in self._prompts.items() if not walk.ended(now)}
        self._left = 1 - min(self._usual_s / (AIM * self._slo_s), 0.9)
        kept: Heap = []
        self._spare, self._half, ends = math.inf, math.inf, now
        for walk in sorted(self._prompts.values(), key=lambda walk: walk.due):
            work = max(self._cost.predict(walk.first.rows) - walk.spent, 0.0) / self._left
            walk.rank = False, walk.due
            heapq.heappush(kept, (-work, walk.first.id, walk))
            ends += work
            if ends > walk.due:
                negative, _, longest = heapq.heappop(kept)
                ends += negative
                longest.rank = True, longest.first.arrived
            self._spare = min(self._spare, walk.due - ends)
            self._half = min(self._half, walk.due - ends - walk.ttft / 2)
        self._last = deque(request for request in self._last if _queued(request))
        last = set(self._last)
        self._queue = [
            (walk.rank, walk.last.id, walk.last)
            for walk in self._prompts.values()
            if _queued(walk.last) and walk.last not in last
        ]
        heapq.heapify(self._queue)


def _first(heap: Heap, now: float) -> tuple[float, int, Walk] | None:
    """Return the entry of a heap that comes first, after removing those before it whose walks have ended."""
    while heap and heap[0][2].ended(now):
        heapq.heappop(heap)
    return heap[0] if heap else None


def _queued(request: Request) -> bool:
    return request.taken < request.rows and not request.cancelled
