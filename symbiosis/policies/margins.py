"""The tuning constants of co-serving. ``docs/decisions/0015-constants-of-co-serving.md`` has the measurements."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MARGINS", "Margins"]


@dataclass(frozen=True, slots=True)
class Margins:
    """How far co-serving stays away from its limits."""

    read: float = 0.5
    tune: float = 0.2
    readings: int = 4
    stretch: float = 1.5
    early: float = 0.92
    earliest: float = 0.7
    ahead: float = 2.0
    learn_late: float = 0.05
    hurry: float = 0.4
    least: float = 0.5
    most: float = 2.0
    starved: float = 20.0
    patience: float = 2.0
    minimum: float = 0.25
    lost: float = 0.8
    given_up: float = 2.0
    learn: float = 0.2
    flat: int = 16
    unknown: int = 64


MARGINS = Margins()
