"""Steps that harm: which ones are, when to go back, and which batches to pass over then.

A step is bad when
- its loss or a gradient is not finite on any rank: DeepSpeed then skips the update on all ranks; or
- its loss is more than `spike_nats` above the median loss of the last `spike_window` good steps, once there have been
  as many.

`max_bad_steps` bad steps in a row are only counted. One more, and the run goes back to the last checkpoint that was
saved after a good step, and passes over the global batches of all the bad steps of that row. As batch number b of the
data order becomes number b of those not passed over, nothing else changes.

Every rank sees the same mean loss and the same verdict of DeepSpeed, so all decide alike. The state is part of the
checkpoint: a run that dies and resumes decides as it would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from pretrain.config import RecoveryConfig


class BadSteps:
    """Counts bad steps and remembers good losses.

    Args:
        state: what `state()` gave when a checkpoint was saved; empty at step 0.
    """

    def __init__(self, config: RecoveryConfig, state: dict[str, Any]) -> None:
        self._config = config
        self._good_losses: deque[float] = deque(state.get("good_losses", []), maxlen=config.spike_window)
        self._row: list[int] = list(state.get("row", []))
        self.total: int = state.get("total", 0)
        """Bad steps since step 0."""

    def state(self) -> dict[str, Any]:
        """Values for JSON."""
        return {"good_losses": list(self._good_losses), "row": self._row, "total": self.total}

    @property
    def in_a_row(self) -> bool:
        """Whether the last step was bad. Its weights are no place to go back to."""
        return bool(self._row)

    def observe(self, batch: int, loss: float, *, update_skipped: bool) -> str | None:
        """Takes in a step on global batch `batch`. Returns why it is bad, or None."""
        reason = self._fault(loss, update_skipped)
        if reason is None:
            self._good_losses.append(loss)
            self._row = []
        else:
            self._row.append(batch)
            self.total += 1
        return reason

    def to_pass_over(self) -> list[int]:
        """Batches to pass over after going back; empty while there is no need to."""
        return list(self._row) if len(self._row) > self._config.max_bad_steps else []

    def _fault(self, loss: float, update_skipped: bool) -> str | None:
        if not math.isfinite(loss):
            return "non-finite loss"
        if update_skipped:
            return "non-finite gradient"
        if len(self._good_losses) == self._config.spike_window:
            median = statistics.median(self._good_losses)
            if loss > median + self._config.spike_nats:
                return f"loss spike: {loss:.4f} is more than {self._config.spike_nats} above the median {median:.4f}"
        return None


def batch_of_step(step: int, passed_over: Sequence[int]) -> int:
    """The global batch that step `step` (from 0) trains on: number `step` of those not passed over."""
    batch = step
    for passed in sorted(passed_over):
        batch += passed <= batch
    return batch
