"""Loss of every round (deep supervision): which rounds are read out, and how much each counts.

    loss = sum over rounds r of w_r * cross_entropy(logits of round r),   sum of w_r = 1

The logits of round r are what the model would give if it stopped there: its state through the same coda, final norm
and output matrix.

| rule     | w_r, before they are made to add up to 1 |
|----------|------------------------------------------|
| last     | 1 for the last round, 0 for the others   |
| uniform  | 1                                        |
| linear   | r                                        |
| numbers  | the r-th number                          |

Under truncated back-propagation the rounds before the cut have no gradient, so that only those after it count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from deeploop_model.errors import ModelConfigError

RoundLossRule = Literal["last", "uniform", "linear"]
RoundLoss = RoundLossRule | tuple[float, ...]


def round_weights(rule: RoundLoss, num_rounds: int, backprop_rounds: int | None = None) -> list[float]:
    """w_1..w_R; zeros for rounds that are not read out. Raises ModelConfigError for a rule that cannot hold."""
    if backprop_rounds is not None and backprop_rounds < 1:
        raise ModelConfigError(f"backprop_rounds: {backprop_rounds} must be 1 or more")
    if rule == "last":
        raw = [0.0] * (num_rounds - 1) + [1.0]
    elif rule == "uniform":
        raw = [1.0] * num_rounds
    elif rule == "linear":
        raw = [float(r) for r in range(1, num_rounds + 1)]
    else:
        raw = checked_numbers(rule, num_rounds)
    cut = 0 if backprop_rounds is None else max(0, num_rounds - backprop_rounds)
    kept = [0.0] * cut + raw[cut:]
    return [weight / sum(kept) for weight in kept]


def checked_numbers(numbers: Sequence[float], num_rounds: int) -> list[float]:
    """Explicit weights of R rounds. Raises ModelConfigError for another count, or numbers that weigh nothing."""
    if isinstance(numbers, str):
        raise ModelConfigError(
            f"round_loss: {numbers!r} is unknown; use {', '.join(get_args(RoundLossRule))} or numbers"
        )
    if len(numbers) != num_rounds:
        raise ModelConfigError(f"round_loss: {len(numbers)} weights were given for {num_rounds} rounds")
    if not all(math.isfinite(w) and w >= 0 for w in numbers) or numbers[-1] <= 0:
        raise ModelConfigError(
            f"round_loss: {list(numbers)} must be numbers of 0 or more, that of the last round more than 0"
        )
    return list(numbers)
