"""Public test kits."""

from symbiosis.testing.compare import Comparison, Job, Outcome, compare, run_job, run_job_plain
from symbiosis.testing.models import ARCHITECTURES, tiny_model

__all__ = [
    "ARCHITECTURES",
    "Comparison",
    "Job",
    "Outcome",
    "compare",
    "run_job",
    "run_job_plain",
    "tiny_model",
]
