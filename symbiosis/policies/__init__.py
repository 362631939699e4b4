"""Batching policies: what runs together, and how long to wait for company. One file each."""

from symbiosis.policies.coserving import CoServing
from symbiosis.policies.lockstep import Lockstep
from symbiosis.policies.no_lockstep import NoLockstep
from symbiosis.policies.opportunistic import Opportunistic
from symbiosis.policies.temporal import DynamicTemporalSharing, TemporalSharing

__all__ = ["CoServing", "DynamicTemporalSharing", "Lockstep", "NoLockstep", "Opportunistic", "TemporalSharing"]
