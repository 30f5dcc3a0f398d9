"""What a bigram model of the same tokens reaches: the level that a language model must beat to have learnt context.

    python -m benchmarks.bigram_baseline data/python-stdlib

Prints the validation loss, in nats per token, of a unigram model and of an interpolated Kneser-Ney bigram model
(Kneser and Ney 1995), its discount chosen to be best on the validation split itself, in the bigram's favour.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.reader import open_split

DISCOUNTS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)


def stream(dataset: Path, split: str) -> NDArray[np.int64]:
    """All tokens of a split, [num_tokens]."""
    tokens = open_split(dataset, split)
    (everything,) = tokens.windows(np.zeros(1, dtype=np.int64), tokens.num_tokens)
    return np.asarray(everything, dtype=np.int64)


def unigram_loss(train_T: NDArray[np.int64], validation_T: NDArray[np.int64], vocab_size: int) -> float:
    """Add-one smoothing."""
    counts = np.bincount(train_T, minlength=vocab_size) + 1.0
    return float(-np.log(counts[validation_T[1:]] / counts.sum()).mean())


def bigram_loss(train_T: NDArray[np.int64], validation_T: NDArray[np.int64], vocab_size: int, discount: float) -> float:
    """p(w|h) = max(c(h,w) - D, 0) / c(h) + D * types(h) / c(h) * p_continuation(w)."""
    pairs, pair_counts = np.unique(train_T[:-1] * vocab_size + train_T[1:], return_counts=True)
    history_counts: NDArray[Any] = np.bincount(train_T[:-1], minlength=vocab_size)
    followers: NDArray[Any] = np.bincount(pairs // vocab_size, minlength=vocab_size)
    continuation = np.bincount(pairs % vocab_size, minlength=vocab_size) + 0.1
    continuation /= continuation.sum()

    history, word = validation_T[:-1], validation_T[1:]
    wanted = history * vocab_size + word
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[place] == wanted, pair_counts[place], 0)
    total = np.maximum(history_counts[history], 1)
    seen = np.maximum(count - discount, 0) / total + discount * followers[history] / total * continuation[word]
    return float(-np.log(np.where(history_counts[history] > 0, seen, continuation[word])).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Unigram and bigram validation loss of a dataset.")
    parser.add_argument("dataset", type=Path)
    dataset = parser.parse_args().dataset
    vocab_size = open_split(dataset, "train").vocab_size
    train_T, validation_T = stream(dataset, "train"), stream(dataset, "validation")
    print(f"unigram {unigram_loss(train_T, validation_T, vocab_size):.3f}")
    losses = {d: bigram_loss(train_T, validation_T, vocab_size, d) for d in DISCOUNTS}
    best = min(losses, key=lambda d: losses[d])
    print(f"bigram  {losses[best]:.3f}  (Kneser-Ney, discount {best})")


if __name__ == "__main__":
    main()
