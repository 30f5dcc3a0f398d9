"""Loop health of a run: `deeploop_model.loop_health` on the same few sequences every time, over all ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from data_prep.order import num_samples
from deeploop_model.loop_health import LoopHealth, LoopSums, health_of
from pretrain.config import MonitorConfig, RunConfig
from pretrain.data_feed import batch_of
from pretrain.engine import Engine
from pretrain.ranks import Ranks, sum_over_ranks
from pretrain.run_data import RunData


class LoopMonitor:
    """Measures `monitor.loop_health_sequences` windows on each rank, spread evenly over the validation split of the
    source with the largest share; of the first training batch where there is no validation.
    """

    def __init__(self, engine: Engine, data: RunData, config: RunConfig, ranks: Ranks) -> None:
        self._engine = engine
        count, context = config.monitor.loop_health_sequences, config.model.context_length
        places = ranks.rank * count + np.arange(count)
        if data.validation:
            split = data.validation[max(data.weights, key=lambda name: data.weights[name])]
            available = num_samples(split.num_tokens, context)
            window = split.windows(places * available // (count * ranks.world_size) * context, context + 1)
        else:
            window = data.training.samples(places)
        separator_id = data.separator_id if config.data.separate_documents else None
        self._batch = batch_of(torch.from_numpy(window), ranks.device, separator_id)

    @torch.no_grad()
    def measure(self) -> LoopHealth:
        """One forward pass. Every rank must call it."""
        batch = self._batch
        self._engine.eval()
        sums = self._engine(batch.tokens_BT, batch.targets_BT, documents_BT=batch.documents_BT, observed=True).loop
        self._engine.train()
        return health_of(over_ranks(sums))


def over_ranks(sums: LoopSums) -> LoopSums:
    """Of all ranks' batches."""
    largest = sums.largest_logit_RK.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LoopSums(
        sum_over_ranks(sums.counts), sum_over_ranks(sums.states_QRK), sum_over_ranks(sums.read_outs_QR), largest
    )


def collapses(health: LoopHealth, config: MonitorConfig) -> dict[str, str]:
    """What has collapsed: quantity, and a sentence with the worst place. Empty for a healthy loop."""
    limits = {
        "attention_entropy": ("attention looks at one token", "collapse_entropy", config.collapse_entropy),
        "state_change": ("rounds change nothing", "collapse_change", config.collapse_change),
    }
    found = {}
    for name, (meaning, key, limit) in limits.items():
        values = np.array(health.per_block[name])
        below = int((values < limit).sum())  # nan, where there is no round before, is not below
        if below:
            r, k = np.unravel_index(int(np.nanargmin(values)), values.shape)
            found[name] = (
                f"{meaning}: {name} {values[r, k]:.3g} in round {r + 1}, block {k} is under monitor.{key} {limit:g} "
                f"({below} of {values.size} places are)"
            )
    return found
