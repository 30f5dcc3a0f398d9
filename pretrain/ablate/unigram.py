"""What a model that knows only how frequent each token is would reach: the level of a run that has learnt nothing more.

A looped model that collapses gives every position the same state; its loss then settles at this level and stays.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.order import num_samples
from data_prep.reader import TokenSplit, open_split
from pretrain.config import RunConfig
from pretrain.run_data import open_data

COUNTED_WINDOWS = 8192
"""Of the training split, spread evenly: enough at any vocabulary for a figure to a few thousandths of a nat."""


def unigram_loss(config: RunConfig) -> float:
    """Validation loss in nats per token of the training split's token frequencies (add-one smoothing).

    Over about the windows that the run validates on; for a mixture, each source by its own frequencies, weighted as
    the run weights them.
    """
    weights = open_data(config).weights
    samples, context = config.train.validation_samples, config.model.context_length
    return sum(
        weight * _of_source(source.path, samples, context)
        for source, weight in zip(config.data.sources, weights.values(), strict=True)
    )


@functools.cache
def _of_source(path: str, samples: int, context: int) -> float:
    training, validation = open_split(Path(path), "train"), open_split(Path(path), "validation")
    counts = (
        np.bincount(_spread_windows(training, COUNTED_WINDOWS, context).ravel(), minlength=training.vocab_size) + 1.0
    )
    targets = _spread_windows(validation, samples, context)[:, 1:]
    return float(-np.log(counts[targets] / counts.sum()).mean())


def _spread_windows(split: TokenSplit, wanted: int, context: int) -> NDArray[np.int64]:
    """Up to `wanted` windows of context + 1 tokens, spread evenly over the split, [windows, context + 1]."""
    available = num_samples(split.num_tokens, context)
    ids = np.linspace(0, available, min(wanted, available), endpoint=False).astype(np.int64)
    return np.asarray(split.windows(ids * context, context + 1), dtype=np.int64)
