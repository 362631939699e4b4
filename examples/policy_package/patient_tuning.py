"""A batching policy in a package of its own: fine-tuning waits for inference. See docs/policies.md."""

from __future__ import annotations

from symbiosis.errors import UsageError
from symbiosis.policies import Decision, Kind, Policy, QueueView, Request, Run, View


class PatientTuning(Policy):
    """Run queues with inference rows first, the largest of them. Fine-tuning runs when there are none. While clients
    generate text, they are thinking and will soon send another request, so a batch of fine-tuning has few rows then.

    Args:
        patience_ms: time after which a request runs before all other requests, in milliseconds.
        rows: rows of fine-tuning in a batch while clients generate text.

    Raises:
        UsageError: an option has no valid value.
    """

    name = "patient-tuning"
    lone_at_once = True

    def __init__(self, patience_ms: float = 800.0, rows: int = 64) -> None:
        if not isinstance(patience_ms, int | float) or not 0 < patience_ms < 1e9:
            raise UsageError(f"patient-tuning: patience_ms is {patience_ms!r}; it must be milliseconds greater than 0")
        if not isinstance(rows, int) or rows < 1:
            raise UsageError(f"patient-tuning: rows is {rows!r}; it must be a whole number, 1 or more")
        self.patience_ms = patience_ms
        self.rows = rows
        self._generated = float("-inf")

    def submitted(self, request: Request) -> None:
        if request.kind is not Kind.FINETUNE:
            self._generated = request.arrived

    def decide(self, view: View, now: float) -> Decision:
        oldest = view.oldest
        if now - oldest.arrived >= self.patience_ms / 1e3:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "patience")
        queue = max(view.queues.values(), key=_importance)
        if _importance(queue)[0]:
            return Run(queue.key, queue.take(view.max_rows), "inference")
        rows = self.rows if now - self._generated < 0.1 else view.max_rows
        return Run(queue.key, queue.take(min(rows, view.max_rows)), "tuning")


def _importance(queue: QueueView) -> tuple[bool, int]:
    """Return whether a queue has inference rows, and its size."""
    return any(request.kind is not Kind.FINETUNE for request in queue), queue.rows
