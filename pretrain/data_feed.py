"""Global batches, cut the same way whatever the number of ranks and the size of a micro-batch.

Global batch s holds positions s*G .. s*G + G - 1 of the epoch order; which rank computes which of them changes
nothing but the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.order import SampleOrder, num_samples
from data_prep.reader import TokenSplit
from pretrain.config import RunConfig
from pretrain.ranks import Ranks


class Batch(NamedTuple):
    """Sequences of one forward pass, int64 [B, T] each."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """The token after each."""
    documents_BT: Tensor | None
    """Ids that attention stays within, or None where it crosses documents."""


def windows_on_device(
    split: TokenSplit, sample_ids: NDArray[np.int64], context: int, device: torch.device, *, separate_documents: bool
) -> Batch:
    """Windows of context + 1 tokens with stride context: tokens 0..context - 1, and the same shifted by one."""
    window = torch.from_numpy(split.windows(sample_ids * context, context + 1))
    if device.type == "cuda":
        window = window.pin_memory().to(device, non_blocking=True)
    tokens_BT, targets_BT = window[:, :-1], window[:, 1:]
    documents_BT = document_ids(tokens_BT, split.manifest.separator_id) if separate_documents else None
    return Batch(tokens_BT, targets_BT, documents_BT)


def document_ids(tokens_BT: Tensor, separator_id: int | None) -> Tensor:
    """0 until the first separator, 1 from it on, and so on, [B, T].

    The separator belongs to the document after it, as in generation, where it stands before the prompt: it is the
    token that the document's first token is predicted from.
    """
    assert separator_id is not None  # checked with the configuration
    return (tokens_BT == separator_id).cumsum(dim=1)


class TrainFeed:
    """This rank's micro-batches of every global batch of the run."""

    def __init__(self, split: TokenSplit, config: RunConfig, accumulation: int, ranks: Ranks) -> None:
        self._split = split
        self._context = config.model.context_length
        self._separate_documents = config.data.separate_documents
        self._order = SampleOrder(num_samples(split.num_tokens, self._context), config.train.seed)
        self._global_batch = config.train.global_batch_size
        self._micro_batch = config.train.micro_batch_size
        self._accumulation = accumulation
        self._ranks = ranks

    def global_batch(self, batch: int) -> NDArray[np.int64]:
        """Sample indices of a whole global batch, on all ranks."""
        return self._order.sample_ids(batch * self._global_batch, self._global_batch)

    def micro_batches(self, batch: int) -> Iterator[Batch]:
        """What this rank accumulates of global batch `batch`, each of [micro batch, context]."""
        for accumulated in range(self._accumulation):
            yield windows_on_device(
                self._split,
                self.sample_ids(batch, accumulated),
                self._context,
                self._ranks.device,
                separate_documents=self._separate_documents,
            )

    def sample_ids(self, batch: int, accumulated: int) -> NDArray[np.int64]:
        """Sample indices of one micro-batch of this rank."""
        first = batch * self._global_batch
        offset = (accumulated * self._ranks.world_size + self._ranks.rank) * self._micro_batch
        return self._order.sample_ids(first + offset, self._micro_batch)
