"""Public test kits. They run in pytest.

* :class:`PolicyConformance` checks a batching policy, and needs the extra ``symbiosis-peft[testing]``. :class:`World`
  and :class:`FakeClock` are its parts.
* :func:`compare` compares a model, or a PEFT method, with plain ``transformers`` + PEFT.
* :func:`tiny_model` builds small random models of four architectures.
* :mod:`symbiosis.testing.transport` checks a transport; :mod:`symbiosis.testing.faults` injects faults.

The package may import every package but ``bench``, ``cli`` and ``cluster``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symbiosis.testing.compare import Comparison, Job, Outcome, compare, run_job, run_job_plain
from symbiosis.testing.models import ARCHITECTURES, tiny_model
from symbiosis.testing.world import FakeClock, World

if TYPE_CHECKING:
    from symbiosis.testing.policy import PolicyConformance

__all__ = [
    "ARCHITECTURES",
    "Comparison",
    "FakeClock",
    "Job",
    "Outcome",
    "PolicyConformance",
    "World",
    "compare",
    "run_job",
    "run_job_plain",
    "tiny_model",
]


def __getattr__(name: str) -> Any:
    """Import the kit for policies when it is used, because it needs hypothesis."""
    if name != "PolicyConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from symbiosis.testing.policy import PolicyConformance

    return PolicyConformance
