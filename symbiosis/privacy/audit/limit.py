"""The limit above which an attack counts as better than on random traffic.

Every attack is also made on several sets of random traffic. Its scores there tell what it would score on one more set
if there were nothing to find. A score that such a set would exceed only very rarely is a find. How rarely follows from
the number of scores in the whole table, so that one table in a hundred has a false find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import mean, stdev

from symbiosis.privacy.audit.scores import Score

FALSE_FINDS = 0.01
"""Probability of at least one false find in a whole table."""


class Limit:
    """The limit above which a score of an attack is a find.

    It follows from scores on two or more independent sets of random traffic, and from the probability of a false find
    that this comparison may have.
    """

    def __init__(self, scores: Sequence[Score], probability: float) -> None:
        if len(scores) < 2:
            raise ValueError("a limit needs scores of at least two sets of random traffic")
        self._probability = probability / 2
        self.cosine = self._limit([score.cosine for score in scores])
        """One more score of random traffic exceeds this with half of ``probability``."""
        self.recovered = self._limit([score.recovered for score in scores])
        """The same for the recovered fraction."""
        self._hits = sum(round(score.recovered * (score.choices or score.rows)) for score in scores)
        self._choices = sum(score.choices or score.rows for score in scores)

    def _limit(self, values: Sequence[float]) -> float:
        """Return the limit for one more value of a normal distribution, by Student's t."""
        count = len(values)
        return mean(values) + _student_t(count - 1, self._probability) * stdev(values) * math.sqrt(1 + 1 / count)

    def exceeded_by(self, score: Score) -> bool:
        """Return whether an attack found something, by its cosine or by its number of right choices or recovered rows.

        A small number of either is not normally distributed, and choices of one set may depend on each other. So the
        number must be too large both as a count of independent events and as a value of a normal distribution.
        """
        if score.cosine > self.cosine:
            return True
        count = score.choices or score.rows
        if not count or score.recovered <= self.recovered:
            return False
        hits = round(score.recovered * count)
        return _choices_tail(hits, count, self._hits, self._choices) < self._probability

    def has_power(self, score: Score) -> bool:
        """Return whether a perfect score with as many choices would be a find."""
        return self.exceeded_by(score._replace(cosine=1.0, recovered=1.0))


@cache
def _student_t(freedom: int, probability: float) -> float:
    """Return the value that Student's t with ``freedom`` degrees of freedom exceeds with a probability."""

    def tail(value: float) -> float:
        # With t = √f·tan(a), the density becomes a power of a cosine over a bounded range.
        low, steps = math.atan(value / math.sqrt(freedom)), 400
        width = (math.pi / 2 - low) / steps
        total = sum(math.cos(low + (step + 0.5) * width) ** (freedom - 1) for step in range(steps))
        constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
        return constant * total * width

    low, high = 0.0, 1.0
    while tail(high) > probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > probability else (low, middle)
    return high


def _choices_tail(hits: int, choices: int, random_hits: int, random_choices: int) -> float:
    """Return the probability of at least ``hits`` right choices, if choices are as good as the random ones.

    The probability of a right choice is known from the random choices only, with a uniform prior. The number of right
    choices then has a beta-binomial distribution.
    """
    a, b = random_hits + 1, random_choices - random_hits + 1

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    def probability(k: int) -> float:
        log_ways = -math.log(choices + 1) - log_beta(k + 1, choices - k + 1)  # the number itself may exceed a float
        return math.exp(log_ways + log_beta(k + a, choices - k + b) - log_beta(a, b))

    return sum(map(probability, range(hits, choices + 1)))
