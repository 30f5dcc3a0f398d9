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

from data_prep.feed import Feed, Share
from data_prep.reader import TokenSplit
from pretrain.config import RunConfig
from pretrain.ranks import Ranks
from pretrain.run_data import RunData


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
    """Some windows of one split, by their number in it."""
    window = torch.from_numpy(split.windows(sample_ids * context, context + 1))
    return batch_of(window, device, split.manifest.separator_id if separate_documents else None)


def bytes_per_token(split: TokenSplit) -> float | None:
    """UTF-8 bytes of text per token of a split; None where its manifest does not know."""
    part = split.manifest.splits[split.split]
    return part.text_bytes / part.tokens if part.text_bytes else None


def batch_of(window: Tensor, device: torch.device, separator_id: int | None) -> Batch:
    """Windows of context + 1 tokens, int64 [B, T + 1], as a batch. None for attention across documents."""
    if device.type == "cuda":
        window = (window if window.is_pinned() else window.pin_memory()).to(device, non_blocking=True)
    tokens_BT, targets_BT = window[:, :-1], window[:, 1:]
    return Batch(tokens_BT, targets_BT, None if separator_id is None else document_ids(tokens_BT, separator_id))


def document_ids(tokens_BT: Tensor, separator_id: int) -> Tensor:
    """0 until the first separator, 1 from it on, and so on, [B, T].

    The separator belongs to the document after it, as in generation, where it stands before the prompt: it is the
    token that the document's first token is predicted from.
    """
    return (tokens_BT == separator_id).cumsum(dim=1)


class TrainFeed:
    """This rank's micro-batches of every global batch of the run, read ahead by a thread. Close it at the end."""

    def __init__(self, data: RunData, config: RunConfig, accumulation: int, ranks: Ranks) -> None:
        train = config.train
        self._mixture = data.training
        self._names = list(data.weights)
        self._share = Share(train.global_batch_size, train.micro_batch_size, ranks.rank, ranks.world_size)
        self._separator_id = data.separator_id if config.data.separate_documents else None
        self._accumulation = accumulation
        self._device = ranks.device
        self._feed: Feed | None = None
        self._next = -1

    def sample_ids(self, batch: int) -> list[str]:
        """The samples of a whole global batch on all ranks, as source:number."""
        first = batch * self._share.global_batch
        sources, starts = self._mixture.starts(np.arange(first, first + self._share.global_batch))
        ids = starts // self._mixture.context
        return [
            f"{self._names[source]}:{number}" for source, number in zip(sources.tolist(), ids.tolist(), strict=True)
        ]

    def micro_batches(self, batch: int) -> Iterator[Batch]:
        """What this rank accumulates of global batch `batch`, each of [micro batch, context]."""
        if self._feed is None or batch != self._next:
            self.close()
            self._feed = Feed(self._mixture, self._share, consumed=batch * self._share.global_batch)
        self._next = batch + 1
        for _ in range(self._accumulation):
            yield batch_of(next(self._feed).tokens, self._device, self._separator_id)

    def close(self) -> None:
        """Ends the reading thread."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
