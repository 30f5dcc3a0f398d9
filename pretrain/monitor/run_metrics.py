"""What `metrics.jsonl` of a run folder tells, read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import PretrainError

Points = list[tuple[int, float]]
"""Of one quantity: optimizer steps done, and the value; values that are no number (diverged) are left out."""


@dataclass
class RunMetrics:
    """All lines, sorted by what they are."""

    points: dict[str, Points] = field(default_factory=dict)
    """By the names in the file."""
    loops: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Loop health by step, without the prefix `loop/`: [round][block] or [round]."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Lines of what should not happen, and of restarts."""
    step: int = 0
    tokens: int = 0

    def last(self, name: str) -> float | None:
        return self.points[name][-1][1] if self.points.get(name) else None

    def lowest(self, name: str) -> tuple[int, float] | None:
        """Step and value of the smallest."""
        return min(self.points[name], key=lambda point: point[1]) if self.points.get(name) else None

    def count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.events)


def read_metrics(path: Path) -> RunMetrics:
    """Reads a file that a run may be writing to: a last line that is cut short is passed over.

    Raises PretrainError where there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PretrainError(f"{path}: {error.strerror}; a run folder holds it once its run has begun") from None
    found = RunMetrics()
    for line in text.splitlines():
        try:
            record = json.loads(line)
            step, tokens = int(record.pop("step")), int(record.pop("tokens"))
        except (ValueError, KeyError):
            continue
        found.step, found.tokens = max(found.step, step), max(found.tokens, tokens)
        if "event" in record:
            found.events.append({"step": step, **record})
            continue
        for name, value in record.items():
            if name.startswith("loop/"):
                found.loops.setdefault(step, {})[name.removeprefix("loop/")] = _numbers(value)
            elif isinstance(value, int | float) and math.isfinite(value):
                found.points.setdefault(name, []).append((step, float(value)))
    return found


def _numbers(value: Any) -> Any:
    """Lists with the file's "nan" and "inf" as numbers again."""
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)
