"""Tokens and texts: when each token is due, and how long tokens usually take.

A *text* is the tokens that one client decodes after a prompt. Its SLO is a mean: a token is due when the text, from its
first token on, has had the SLO for each token, so the tokens after a late one make up for it. FlexLLM (section 6) keeps
each iteration below the SLO; here an iteration is a client's walk, whose requests are scheduled one by one.

Which requests form a token is not stated by the client. A walk ends when the client's next request is for an earlier
layer or of another kind.
"""

from __future__ import annotations

from collections import OrderedDict

from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.policies.latency import Fit
from symbiosis.policies.margins import Margins
from symbiosis.policies.slack import Slack, Token

_MAX_CLIENTS = 4096
_DECODE, _PREFILL, _ = Kind
"""Names of their own: on Python 3.11 a member looked up on its class takes six times as long."""


class Usual:
    """Moving averages over the tokens so far, without the time that went to prefill and fine-tuning."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.token = 0.0
        """Seconds for a token of any client. A client that begins a text runs beside the clients that decode now."""
        self.prefill = Fit()
        """Seconds for a prefill, by its rows."""

    def of(self, client: str) -> tuple[float, float]:
        """Return the seconds that a client's token takes, and those of them in which the client has no request here."""
        return self._clients.get(client, (0.0, 0.0))

    def learn(self, token: Token, client: str, seconds: float) -> None:
        """Learn from a decoded token that took so many seconds."""
        weight = self._weight
        before, away = self._clients.pop(client, (seconds, token.away))
        if len(self._clients) >= _MAX_CLIENTS:
            self._clients.popitem(last=False)
        self._clients[client] = (1 - weight) * before + weight * seconds, (1 - weight) * away + weight * token.away
        if token.typical:
            self.token = (1 - weight) * self.token + weight * seconds


class Tokens:
    """The walks of all inference clients, and the slack of those that are under way.

    Args:
        slo_ms, ttft_ms: latency targets of clients without their own.
        margins: tuning constants.
    """

    def __init__(self, slo_ms: float, ttft_ms: float, margins: Margins) -> None:
        self.slack = Slack()
        self.usual = Usual(margins.learn)
        self._slo_ms, self._ttft_ms = slo_ms, ttft_ms
        self._margins = margins
        self._tokens: OrderedDict[str, Token] = OrderedDict()

    def of(self, client: str) -> Token | None:
        """Return the latest walk of a client, which may be over."""
        return self._tokens.get(client)

    def submitted(self, request: Request) -> None:
        """Note a request of an inference client."""
        token = self._tokens.get(request.client)
        layer, prefill = request.key.layers[0], request.kind is _PREFILL
        if token is None or token.over or layer <= token.layer or token.prefill != prefill:
            continues = token is not None and self._finish(token, request)
            token = self._begin(request, token if continues else None)
        if token.answered:
            _returned(token, request.arrived)
        token.layer, token.last = layer, request

    def answered(self, client: str, at: float) -> None:
        """Note that a decoding client got an answer at time ``at``."""
        token = self._tokens.get(client)
        if token is not None:
            token.answered = at

    def in_a_hurry(self, client: str, now: float) -> bool:
        """Return whether a prefill has used up so much of its time that it need not fit into the slack any more."""
        token = self._tokens.get(client)
        return token is not None and token.prefill and now > token.began + self._margins.hurry * token.slo

    def _finish(self, token: Token, request: Request) -> bool:
        """End a walk at its client's next request and learn from it. Return whether the request continues the text."""
        token.over = True
        usual, slack = self.usual, self.slack
        if token.prefill and request.kind is _DECODE:
            usual.prefill.learn(token.rows, request.arrived - token.began - (slack.tuned - token.tuned))
        seconds = request.arrived - token.began - (slack.others - token.others)
        if token.prefill or request.kind is _PREFILL or not 0 < seconds <= 2 * token.patience:
            return False  # a longer time is a pause between two texts
        _returned(token, request.arrived)
        usual.learn(token, request.client, seconds)
        return True

    def _begin(self, request: Request, before: Token | None) -> Token:
        """Begin a walk. ``before`` is the token that precedes it in the same text."""
        client = request.client
        token = self._token(request, before)
        if client not in self._tokens and len(self._tokens) >= _MAX_CLIENTS:
            self._tokens.popitem(last=False)[1].over = True
        self._tokens[client] = token
        if token.prefill:
            self.slack.add_prefill(token, request, self._room(token))
        elif not self._lost(token, request):
            usual = max(self.usual.of(client)[0], self.usual.token) or token.slo / 2
            self.slack.add_token(token, request, usual)
        self.slack.shrink(len(self._tokens))
        return token

    def _token(self, request: Request, before: Token | None) -> Token:
        now, margins, slack, terms = request.arrived, self._margins, self.slack, request.terms
        prefill = request.kind is _PREFILL
        default = (self._ttft_ms if prefill else self._slo_ms) / 1e3
        asked = terms.ttft_ms if prefill else terms.slo_ms
        slo = asked / 1e3 if asked else default
        if request.tenants:  # some of them may have the default
            slo = min(slo, default)
        aim = margins.early * slo
        text_began, number = (before.text_began, before.number + 1) if before else (now, 0)
        due = min(text_began + (number + 1) * aim, now + margins.most * aim)
        token = Token(
            began=now,
            slo=slo,
            due=due,
            prefill=prefill,
            rows=request.rows,
            others=slack.others,
            tuned=slack.tuned,
            last=request,
            text_began=text_began,
            number=number,
            patience=margins.given_up * (slo if request.local else min(slo, default)),
            typical=request.local or slo <= default,
        )
        token.typical &= not self._lost(token, request)
        return token

    def _lost(self, token: Token, request: Request) -> bool:
        """Return whether a client elsewhere spends so much of its SLO there that it misses the SLO in any case."""
        return not request.local and self.usual.of(request.client)[1] >= self._margins.lost * token.slo

    def _room(self, token: Token) -> float | None:
        """Return the seconds that fine-tuning may take from a prefill, or None before the first one was measured."""
        if not self.usual.prefill.count or not token.typical:
            return None
        usual = self.usual.prefill.predict(token.rows)
        return min(token.due - token.began, self._margins.stretch * usual) - usual


def _returned(token: Token, now: float) -> None:
    """Note that the client of a token has sent its next request."""
    if token.answered:
        token.away += max(now - token.answered, 0.0)
        token.answered = 0.0
