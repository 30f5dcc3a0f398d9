"""The runs of a study as a list for people: what is planned, what it costs, how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.ablate.plan import PlannedRun, stored_parameters
from pretrain.ablate.runner import outcome


def listing(runs: Sequence[PlannedRun]) -> str:
    """A line per run with its index, and the sum of their FLOPs."""
    rows = [("index", "run", "stored parameters", "tokens", "training FLOPs", "state")]
    rows += [
        (f"{index}", run.label, f"{stored_parameters(run.config.model):,}", f"{run.tokens:,}", f"{run.flops:.4g}",
         outcome(run))
        for index, run in enumerate(runs)
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (True, False, True, True, True, False)
    lines = [
        "  ".join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    total = sum(run.flops for run in runs)
    return "\n".join([*lines, f"{len(runs)} runs, {total:.4g} training FLOPs in all"])
