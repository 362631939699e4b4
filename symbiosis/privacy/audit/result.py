"""The result of an audit: scores of all attacks, which of them are finds, and what schemes cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from symbiosis.privacy.audit.costs import SchemeCosts
from symbiosis.privacy.audit.limit import Limit
from symbiosis.privacy.audit.provider import Scores
from symbiosis.privacy.audit.workload import Workload


@dataclass
class Observation:
    """The attacks of one executor, or of all together, on the traffic of one scheme."""

    scheme: str
    executor: str
    """Which executor it is; empty for a scheme with one executor."""
    scores: Scores
    collusion: bool = False
    """Whether the executors collude, against which no scheme claims to protect."""
    found: dict[str, set[str]] = field(default_factory=dict)
    """Attack → goals at which it did better than on random traffic. The audit sets it."""

    @property
    def name(self) -> str:
        return f"{self.scheme} ({self.executor})" if self.executor else self.scheme


@dataclass
class Audit:
    """The result of an audit."""

    plan: Workload
    observations: list[Observation]
    bare: Observation
    """Attacks on bare rows. What they do not find there they would not find under any scheme."""
    costs: dict[str, SchemeCosts]
    limits: dict[str, dict[str, Limit]]
    """Attack → goal → limit above which a score is a find."""
    probability: float
    """Probability of a false find in one comparison."""
    sets: int
    """Sets of random traffic."""
    random_error: float
    """Least error of activations that an attack reached on random traffic, by guesses from the public model."""
    schemes: dict[str, str]
    """Scheme as requested → scheme with all its options."""

    def __post_init__(self) -> None:
        for observation in (self.bare, *self.observations):
            observation.found = {
                attack: {goal for goal, score in scores.items() if self.limit(attack, goal).exceeded_by(score)}
                for attack, scores in observation.scores.items()
            }
        goals = {goal for scores in self.bare.scores.values() for goal in scores}
        self.missed: set[str] = goals.difference(*self.bare.found.values())
        """Goals at which no attack finds anything in bare rows."""

    def holds(self, scheme: str) -> bool | None:
        """Return whether no attack got more from a scheme's traffic than from random traffic.

        Returns None if no attack got more, but there is a goal at which no attack finds anything in bare rows either.
        """
        for observation in self.observations:
            if observation.scheme == scheme and not observation.collusion and any(observation.found.values()):
                return False
        return None if self.missed else True

    def limit(self, attack: str, goal: str) -> Limit:
        """Return the limit of an attack for a goal."""
        return self.limits[attack][goal]
