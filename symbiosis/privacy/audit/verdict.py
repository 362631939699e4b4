"""When an attack counts as no better than on random traffic.

Every attack is made on several lots of random traffic too. What it scores there says what it would score on one lot
more, if there were nothing to find: a score beyond what that would exceed once in a great many times is a find. How
many follows from the number of scores in the whole table, so that it has one false find in a hundred tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from symbiosis.privacy.audit.goals import Score

__all__ = ["FALSE_FINDS", "Limit"]

FALSE_FINDS = 0.01
"""Probability of one or more false finds in a whole table."""


class Limit:
    """What an attack scores on random traffic.

    Args:
        scores: on independent lots of random traffic, two or more.
        share: the probability of a false find that this comparison may have.
    """

    def __init__(self, scores: Sequence[Score], share: float) -> None:
        if len(scores) < 2:
            raise ValueError("what is random cannot be told from fewer than two scores")
        self._share = share / 2
        self.cosine = self._below([score.cosine for score in scores])
        """One more score of random traffic is above this with a probability of ``share`` / 2."""
        self.recovered = self._below([score.recovered for score in scores])
        """The same of what is recovered."""
        self._hits = sum(round(score.recovered * score.choices) for score in scores)
        self._choices = sum(score.choices for score in scores)

    def _below(self, values: Sequence[float]) -> float:
        """By Student's t, for one value more of a normal distribution of which only these are known."""
        count = len(values)
        mean = sum(values) / count
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        return mean + _t(count - 1, self._share) * deviation * math.sqrt(1 + 1 / count)

    def exceeded_by(self, score: Score) -> bool:
        """Whether the attack found something: by its cosine, or by how often it chose rightly.

        Few right choices are not normally distributed, and choices of one lot may hang together; so they must be too
        many both as single events and as the sum of a lot.
        """
        if score.cosine > self.cosine:
            return True
        if not score.choices or score.recovered <= self.recovered:
            return False
        return _tail(round(score.recovered * score.choices), score.choices, self._hits, self._choices) < self._share

    def has_power(self, score: Score) -> bool:
        """Whether the attack could have found anything: whether a perfect score, of as many choices, would count."""
        return self.exceeded_by(score._replace(cosine=1.0, recovered=1.0))


@cache
def _t(freedom: int, probability: float) -> float:
    """What Student's t of so many degrees of freedom exceeds with this probability."""

    def exceeds(value: float) -> float:
        # With t = √f·tan(a) the density becomes one of cosines, over a bounded range.
        low, steps = math.atan(value / math.sqrt(freedom)), 400
        width = (math.pi / 2 - low) / steps
        total = sum(math.cos(low + (step + 0.5) * width) ** (freedom - 1) for step in range(steps))
        constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
        return constant * total * width

    low, high = 0.0, 1.0
    while exceeds(high) > probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) > probability else (low, middle)
    return high


def _tail(hits: int, choices: int, random_hits: int, random_choices: int) -> float:
    """Probability of so many right choices or more, the chance of one being known from the random ones only
    (the beta-binomial distribution, from a uniform prior)."""
    a, b = random_hits + 1, random_choices - random_hits + 1

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return sum(
        math.exp(
            math.lgamma(choices + 1)
            - math.lgamma(k + 1)
            - math.lgamma(choices - k + 1)
            + log_beta(k + a, choices - k + b)
            - log_beta(a, b)
        )
        for k in range(hits, choices + 1)
    )
