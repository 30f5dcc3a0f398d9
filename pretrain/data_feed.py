"""Global batches, cut the same way whatever the number of ranks and the size of a micro-batch.

Global batch s holds positions s*G .. s*G + G - 1 of the epoch order; which rank computes which of them changes
nothing but the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.order import SampleOrder, num_samples
from data_prep.reader import TokenSplit
from pretrain.config import TrainConfig
from pretrain.ranks import Ranks


def windows_on_device(
    split: TokenSplit, sample_ids: NDArray[np.int64], context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(tokens, targets), each [len(sample_ids), context] int64: windows of context + 1 tokens with stride context."""
    window = torch.from_numpy(split.windows(sample_ids * context, context + 1))
    if device.type == "cuda":
        window = window.pin_memory().to(device, non_blocking=True)
    return window[:, :-1], window[:, 1:]


class TrainFeed:
    """This rank's micro-batches of every global batch of the run."""

    def __init__(self, split: TokenSplit, context: int, config: TrainConfig, accumulation: int, ranks: Ranks) -> None:
        self._split = split
        self._context = context
        self._order = SampleOrder(num_samples(split.num_tokens, context), config.seed)
        self._global_batch = config.global_batch_size
        self._micro_batch = config.micro_batch_size
        self._accumulation = accumulation
        self._ranks = ranks

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The (tokens, targets) pairs that this rank accumulates in step `step`, each [micro batch, context]."""
        for accumulated in range(self._accumulation):
            yield windows_on_device(self._split, self.sample_ids(step, accumulated), self._context, self._ranks.device)

    def sample_ids(self, step: int, accumulated: int) -> NDArray[np.int64]:
        """Sample indices of one micro-batch of this rank."""
        first = step * self._global_batch
        offset = (accumulated * self._ranks.world_size + self._ranks.rank) * self._micro_batch
        return self._order.sample_ids(first + offset, self._micro_batch)
