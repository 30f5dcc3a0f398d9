"""How fast are batches read? Ours beside Megatron's GPTDataset and litdata, from page cache, in one process.

    python -m benchmarks.reading [--tokens 200000000] [--context 1024]

Prints tokens/s of each, by the clock and by CPU time (which other work on the machine disturbs less), the median of
interleaved rounds. Resident memory before and after each round goes to standard error. megatron-core is in
requirements-dev.txt; `pip install litdata==0.2.76` adds the third.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.mixture import Mixture, Source
from tests.support.datasets import write_dataset

_BATCH = 64
_SECONDS = 2.0
_ROUNDS = 3
_PIECES = 64


def _resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


class Rate(NamedTuple):
    """Tokens per second of the clock, and of CPU time."""

    clock: float
    cpu: float


def _rate(read: Callable[[int], int], first: int) -> Rate:
    """Of `read(first position) -> tokens`, batch after batch for some seconds."""
    tokens, position = 0, first
    begun, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < _SECONDS:
        tokens += read(position)
        position += _BATCH
    return Rate(tokens / (time.perf_counter() - begun), tokens / (time.process_time() - cpu))


def _ours(folder: Path, context: int) -> Callable[[int], int]:
    mixture = Mixture([Source(folder, 1.0)], "train", context, seed=0)
    return lambda first: mixture.samples(np.arange(first, first + _BATCH)).size


def _megatron(folder: Path, context: int) -> Callable[[int], int]:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class _Tokenizer:
        eod = 0
        unique_identifiers = {"class": "none"}  # noqa: RUF012
        pad = -1
        vocab_size = 50_000

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=context,
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
    )
    indexed = IndexedDataset(str(folder / "corpus-train-00000"))
    documents = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    dataset = GPTDataset(indexed, "corpus", documents, None, Split.train, config)

    def read(first: int) -> int:
        return sum(dataset[(first + i) % len(dataset)]["tokens"].numel() for i in range(_BATCH))

    return read


def _piece(path: Path, number: int) -> NDArray[np.uint16]:
    """One of `_PIECES` parts of a shard's tokens."""
    tokens: NDArray[np.uint16] = np.array_split(np.memmap(path, dtype=np.uint16, mode="r"), _PIECES)[number]
    return np.array(tokens)


def _litdata(folder: Path, context: int) -> Callable[[int], int]:
    from litdata import StreamingDataset, TokensLoader, optimize

    target = folder / "litdata"
    optimize(
        fn=partial(_piece, folder / "corpus-train-00000.bin"),
        inputs=list(range(_PIECES)),
        output_dir=str(target),
        chunk_size=(context + 1) * 8192,
        item_loader=TokensLoader(block_size=context + 1),
        num_workers=1,
    )
    dataset = StreamingDataset(str(target), item_loader=TokensLoader(block_size=context + 1), shuffle=True)
    rows = iter(dataset)

    def read(first: int) -> int:
        nonlocal rows
        total = 0
        for _ in range(_BATCH):
            row = next(rows, None)
            if row is None:
                rows = iter(dataset)
                row = next(rows)
            total += len(row)
        return total

    return read


def main() -> None:
    """Writes a dataset, then times each reader on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--readers", nargs="+", default=["ours", "megatron", "litdata"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = [1000] * (arguments.tokens // 1000)
        tokens = np.random.default_rng(0).integers(0, 50_000, sum(lengths))
        write_dataset(folder, {"train": [tokens]}, document_lengths=lengths)
        del tokens
        makers = {"ours": _ours, "megatron": _megatron, "litdata": _litdata}
        packages = {"ours": "numpy", "megatron": "megatron", "litdata": "litdata"}
        readers = [reader for reader in arguments.readers if importlib.util.find_spec(packages[reader]) is not None]
        read = {reader: makers[reader](folder, arguments.context) for reader in readers}
        rates: dict[str, list[Rate]] = {reader: [] for reader in readers}
        for turn in range(_ROUNDS):
            for reader in readers:
                before = _resident_mib()
                rates[reader].append(_rate(read[reader], turn * _BATCH * 10_000))
                print(f"{reader}: resident {before:,.0f} -> {_resident_mib():,.0f} MiB", file=sys.stderr)
        for reader, found in rates.items():
            clock, cpu = (median(values) for values in zip(*found, strict=True))
            print(f"{reader}: {clock / 1e6:,.0f} million tokens/s, {cpu / 1e6:,.0f} per CPU second")


if __name__ == "__main__":
    main()
