"""Public test kits. They need pytest and the extra ``symbiosis-peft[testing]``.

* :class:`PolicyConformance` checks a batching policy. :class:`World` and :class:`FakeClock` are its parts.
* :func:`compare` compares a model, or a PEFT method, with plain ``transformers`` + PEFT.
* :func:`tiny_model` builds small random models of four architectures.
* :mod:`symbiosis.testing.transport` checks a transport; :mod:`symbiosis.testing.faults` injects faults.

The package may import every package but ``bench`` and ``cli``.
"""

from symbiosis.testing.compare import Comparison, Job, Outcome, compare, run_job, run_job_plain
from symbiosis.testing.models import ARCHITECTURES, tiny_model
from symbiosis.testing.policy import PolicyConformance
from symbiosis.testing.world import FakeClock, World

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
