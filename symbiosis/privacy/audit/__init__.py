"""Plays an honest-but-curious provider against a tenant's real traffic, under each privacy scheme.

A small base model, an executor in this process, a wiretap at its door, and a tenant with an adapter that the audit
knows, who generates and fine-tunes. Then every attack on what the wiretap saw, with the public weights at hand; and
the same attacks on random traffic, which say how well one does where there is nothing to find.
"""

from symbiosis.privacy.audit.report import COSTS, around, as_data, best, markdown, plot, summary, verdict, write_into
from symbiosis.privacy.audit.run import SCHEMES, Audit, Costs, View, audit
from symbiosis.privacy.audit.scene import Plan

__all__ = [
    "COSTS",
    "SCHEMES",
    "Audit",
    "Costs",
    "Plan",
    "View",
    "around",
    "as_data",
    "audit",
    "best",
    "markdown",
    "plot",
    "summary",
    "verdict",
    "write_into",
]
