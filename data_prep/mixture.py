"""Samples from one or several datasets, in an order that position alone determines.

A sample is a window of context + 1 tokens with stride context. Sources are interleaved by weight with the least
deviation: after n samples of S sources, source i has given weight_i * n of them within (1 + S) / 2. Each source goes
through its own keyed permutation, epoch after epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.order import SampleOrder, num_samples
from data_prep.packing import Documents
from data_prep.reader import TokenSplit, open_split

_Read = Callable[[NDArray[np.int64], int], NDArray[np.int64]]
_CYCLE = 1 << 16  # samples after which the interleaving repeats; weights are rounded to multiples of 1 / _CYCLE


@dataclass(frozen=True)
class Source:
    """A dataset folder and its share of the samples; weights need not sum to 1."""

    path: Path
    weight: float


def _quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """Samples of each source in a cycle: largest remainders, and at least one each."""
    shares = np.asarray(weights, dtype=np.float64)
    if shares.size == 0 or not (shares > 0).all() or not np.isfinite(shares).all():
        raise DataError(f"mixture weights {list(weights)}: expected positive numbers")
    exact = shares / shares.sum() * _CYCLE
    quotas: NDArray[np.int64] = np.maximum(1, np.floor(exact)).astype(np.int64)
    order = np.argsort(-(exact - quotas), kind="stable")
    missing = _CYCLE - int(quotas.sum())
    if missing >= 0:
        quotas[order[:missing]] += 1
    else:  # minimum of one sample was forced on some; take from the largest
        quotas[np.argmax(quotas)] += missing
    return quotas


def _interleaving(quotas: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which source gives each sample of a cycle: each source's samples spread evenly over it; int64 [_CYCLE]."""
    times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
    sources = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
    interleaved: NDArray[np.int64] = sources[np.lexsort((sources, times))]
    return interleaved


class Mixture:
    """An endless, randomly accessible sequence of samples over one or more sources.

    The sample at a position depends on (sources, weights, seed) alone: not on ranks, batch sizes or resumes.
    """

    def __init__(self, sources: Sequence[Source], split: str, context: int, seed: int) -> None:
        self.splits: list[TokenSplit] = [open_split(source.path, split) for source in sources]
        self.context = context
        self.vocab_size = self.splits[0].vocab_size
        for source, opened in zip(sources, self.splits, strict=True):
            first, this = self.splits[0].manifest.tokenizer, opened.manifest.tokenizer
            if (this.sha256, this.vocab_size) != (first.sha256, first.vocab_size):
                raise DataError(f"{source.path}: made with another tokenizer than {sources[0].path}")
        self.num_samples = [num_samples(opened.num_tokens, context) for opened in self.splits]
        # A source's own seed, so that two equal sources do not walk in step; the first has the plain seed.
        self._orders = [SampleOrder(count, seed + 1_000_003 * i) for i, count in enumerate(self.num_samples)]
        self._documents = [Documents(opened) for opened in self.splits]
        quotas = _quotas([source.weight for source in sources])
        self._quotas = quotas
        self._cycle = _interleaving(quotas)
        # How many samples of its source precede each place of the cycle.
        self._rank = np.empty(_CYCLE, dtype=np.int64)
        for number in range(len(quotas)):
            places = np.flatnonzero(self._cycle == number)
            self._rank[places] = np.arange(len(places))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what determines the samples beside context and seed: each source's tokens and its weight."""
        content = [[split.manifest.fingerprint, quota] for split, quota in zip(self.splits, self._quotas, strict=True)]
        return hashlib.sha256(json.dumps(content, default=int).encode()).hexdigest()

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each position, and how many samples that source has given before; int64 [n] each."""
        positions = np.asarray(positions, dtype=np.int64)
        if len(self._quotas) == 1:
            return np.zeros_like(positions), positions
        cycles, places = np.divmod(positions, _CYCLE)
        sources = self._cycle[places]
        return sources, cycles * self._quotas[sources] + self._rank[places]

    def starts(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and first token of the window at each position; int64 [n] each."""
        sources, steps = self.locate(positions)
        starts = np.empty_like(steps)
        for source, order in enumerate(self._orders):
            here = np.flatnonzero(sources == source)
            if here.size:
                starts[here] = order.ids_at(steps[here]) * self.context
        return sources, starts

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Windows at these consumption positions; int64 [n, context + 1]."""
        return self._gathered(positions, [split.windows for split in self.splits])

    def document_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Document of each token of `samples(positions)`, counted within its source; int64 [n, context + 1]."""
        return self._gathered(positions, [documents.document_ids for documents in self._documents])

    def _gathered(self, positions: NDArray[np.int64], read: Sequence[_Read]) -> NDArray[np.int64]:
        sources, starts = self.starts(positions)
        if len(read) == 1:
            return read[0](starts, self.context + 1)
        rows = np.empty((len(starts), self.context + 1), dtype=np.int64)
        for source, read_source in enumerate(read):
            here = np.flatnonzero(sources == source)
            if here.size:
                rows[here] = read_source(starts[here], self.context + 1)
        return rows

    def epochs(self, consumed: int) -> list[float]:
        """Epochs of each source that `consumed` samples amount to."""
        cycles, rest = divmod(consumed, _CYCLE)
        counts = cycles * self._quotas + np.bincount(self._cycle[:rest], minlength=len(self._quotas))
        return [float(count) / samples for count, samples in zip(counts.tolist(), self.num_samples, strict=True)]
