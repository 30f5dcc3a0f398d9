"""How fast are batches read? Ours beside Megatron's GPTDataset and litdata, from page cache, in one process.

    python -m benchmarks.reading [--tokens 200000000] [--context 1024]

Prints tokens/s of each and ratios to ours. megatron-core is in requirements-dev.txt; `pip install litdata==0.2.76` adds
the third. Resident memory before and after a long read is printed too.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_prep.mixture import Mixture, Source
from tests.support.datasets import write_dataset

_BATCH = 64
_SECONDS = 5.0


def _resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


def _rate(read: Callable[[int], int]) -> float:
    """Tokens per second of `read(first position) -> tokens`, after one warm-up pass."""
    read(0)
    tokens, position, begun = 0, _BATCH, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < _SECONDS:
        tokens += read(position)
        position += _BATCH
    return tokens / elapsed


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


def _litdata(folder: Path, context: int) -> Callable[[int], int]:
    from litdata import StreamingDataset, TokensLoader, optimize

    target = folder / "litdata"
    tokens = np.memmap(folder / "corpus-train-00000.bin", dtype=np.uint16, mode="r")
    pieces = np.array_split(tokens, 64)
    optimize(
        fn=lambda index: np.asarray(pieces[index], dtype=np.int32),
        inputs=list(range(64)),
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
        packages = {"megatron": "megatron.core", "litdata": "litdata"}
        rates: dict[str, float] = {}
        for reader in arguments.readers:
            package = packages.get(reader)
            if package is not None and importlib.util.find_spec(package.split(".")[0]) is None:
                print(f"{reader}: not installed")
                continue
            before = _resident_mib()
            rates[reader] = _rate(makers[reader](folder, arguments.context))
            ratio = rates[reader] / rates["ours"] if "ours" in rates else float("nan")
            print(
                f"{reader}: {rates[reader] / 1e6:,.0f} million tokens/s ({ratio:.2f} of ours), "
                f"resident {before:,.0f} -> {_resident_mib():,.0f} MiB"
            )


if __name__ == "__main__":
    main()
