"""The cheapest recompute policy whose memory fits a budget, from the predictions of `deeploop_model.memory`.

Policies by the time that they take, least first (`benchmarks.many_rounds time`): none computes nothing again, selective
what is one pass over memory, block, round and segment:n one forward pass, nested nearly two.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError
from deeploop_model.memory import Precision, step_bytes

AUTO = "auto"
MIB = 2**20


@dataclass(frozen=True)
class Choice:
    policy: str
    predicted_bytes: int
    reason: str
    """One line for the user."""


def choose_recompute(
    config: DeepLoopConfig,
    tokens: int,
    budget_bytes: float,
    precision: Precision,
    num_rounds: int | None = None,
    without: Collection[str] = (),
) -> Choice:
    """For steps of `tokens` tokens at once; `without` are policies to leave out. Raises ModelConfigError where nothing
    fits."""
    rounds = config.num_rounds if num_rounds is None else num_rounds
    segments = [f"segment:{n}" for n in range(2, rounds // 2 + 1)]
    ordered = [p for p in ("none", "selective", "block", "round", *segments, "nested") if p not in without]
    sizes = {policy: step_bytes(config, policy, tokens, precision, rounds) for policy in ordered}
    for policy in ordered:
        if sizes[policy] <= budget_bytes:
            told = [other for other in ordered if other != policy and other not in segments]
            reason = (
                f"recompute: {policy}, the cheapest that fits {budget_bytes / MIB:,.0f} MiB: predicted "
                f"{sizes[policy] / MIB:,.0f} MiB for {tokens} tokens and {rounds} rounds "
                f"(others: {', '.join(f'{other} {sizes[other] / MIB:,.0f}' for other in told)})"
            )
            return Choice(policy, sizes[policy], reason)
    least = min(sizes, key=lambda policy: sizes[policy])
    raise ModelConfigError(
        f"recompute: nothing fits {budget_bytes / MIB:,.0f} MiB: {least} takes {sizes[least] / MIB:,.0f} MiB for "
        f"{tokens} tokens and {rounds} rounds; take fewer sequences at once, or a larger budget"
    )
