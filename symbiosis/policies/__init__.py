"""Batching policies: what runs together, and how long to wait for company. One file each."""

from symbiosis.policies.coserving import CoServing
from symbiosis.policies.fair import Fair
from symbiosis.policies.lockstep import Lockstep
from symbiosis.policies.no_lockstep import NoLockstep
from symbiosis.policies.opportunistic import Opportunistic
from symbiosis.policies.priority import Priority
from symbiosis.policies.rate_limit import RateLimit
from symbiosis.policies.temporal import DynamicTemporalSharing, TemporalSharing

__all__ = [
    "CoServing",
    "DynamicTemporalSharing",
    "Fair",
    "Lockstep",
    "NoLockstep",
    "Opportunistic",
    "Priority",
    "RateLimit",
    "TemporalSharing",
]
