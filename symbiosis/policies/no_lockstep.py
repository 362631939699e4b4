"""No-lockstep: run each request at once and alone (Symbiosis, section 3.7). The baseline without batching."""

from __future__ import annotations

from symbiosis.core.policy import Decision, Policy, Run, View


class NoLockstep(Policy):
    """Run the oldest request alone, as soon as the executor is free."""

    name = "no-lockstep"
    lone_at_once = True

    def decide(self, view: View, now: float) -> Decision:
        oldest = view.oldest
        return Run(oldest.key, [(oldest, min(oldest.remaining, view.max_rows))], "at-once")
