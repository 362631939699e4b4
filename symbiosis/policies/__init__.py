"""Batching policies, one file each, and the names that the author of a policy needs.

A policy decides which queued rows run next and how long to wait. This package imports ``core`` and ``errors`` only.
Start reading at :class:`Policy`, then :mod:`symbiosis.policies.no_lockstep`, which is the shortest policy.
"""

from symbiosis.core.policy import Decision, Policy, QueueView, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.terms import Kind, Terms, tenant_of
from symbiosis.policies.coserving import CoServing
from symbiosis.policies.fair import Fair
from symbiosis.policies.lockstep import Lockstep
from symbiosis.policies.no_lockstep import NoLockstep
from symbiosis.policies.opportunistic import Opportunistic
from symbiosis.policies.priority import Priority
from symbiosis.policies.rate_limit import RateLimit
from symbiosis.policies.temporal import DynamicTemporalSharing, TemporalSharing

__all__ = [
    "Batch",
    "CoServing",
    "Decision",
    "DynamicTemporalSharing",
    "Fair",
    "Key",
    "Kind",
    "Lockstep",
    "NoLockstep",
    "Opportunistic",
    "Pass",
    "Policy",
    "Priority",
    "QueueView",
    "RateLimit",
    "Request",
    "Run",
    "TemporalSharing",
    "Terms",
    "View",
    "Wait",
    "tenant_of",
]
