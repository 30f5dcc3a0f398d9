"""How fast is `tokenize`, end to end?

    python -m benchmarks.tokenizing [--megabytes 60] [--workers 2] [--ways ours nanogpt datatrove]

On one corpus (JSON lines of the standard library's sources), one tokenizer (a byte-level BPE trained here) and the
same cores it prints
  - ours / (raw tokenizer speed of one core x cores), to be at least 0.9;
  - ours / nanoGPT's step (`datasets.map` with `num_proc`, then a memory map, as in data/openwebtext/prepare.py);
  - ours / datatrove's DocumentTokenizer (`pip install datatrove[processing]==0.10.1`), each to be at least 2.
Start-up of every way is included in its time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_prep.sources import stdlib


def _texts(size: int) -> list[str]:
    """Documents of about 3 KB, `size` bytes in all."""
    found: list[str] = []
    root = stdlib.stdlib_root()
    for path in stdlib.stdlib_files(root):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        found += [text[start : start + 3000] for start in range(0, len(text), 3000)]
    texts: list[str] = []
    total = 0
    while total < size:
        for text in found:
            texts.append(f"{len(texts)}\n{text}")  # no two the same, so that no cache has seen it
            total += len(text)
            if total >= size:
                break
    return texts


def _train(path: Path, texts: list[str]) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:1500], trainer)
    tokenizer.save(str(path))


def _raw(tokenizer_file: Path, texts: list[str]) -> float:
    """Bytes per second of one core that does nothing but encode."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    sample = texts[: len(texts) // 4]
    begun = time.perf_counter()
    for text in sample:
        tokenizer.encode(text, add_special_tokens=False)
    return sum(len(text.encode()) for text in sample) / (time.perf_counter() - begun)


def _ours(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    options = ["--input", corpus, "--tokenizer", tokenizer_file, "--out", out, "--workers", workers]
    command = [sys.executable, "-m", "data_prep", "tokenize", *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _nanogpt(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    import datasets

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    eos = tokenizer.token_to_id("<|endoftext|>")

    def process(example: dict[str, Any]) -> dict[str, Any]:
        ids = [*tokenizer.encode(example["text"], add_special_tokens=False).ids, eos]
        return {"ids": ids, "len": len(ids)}

    table = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(out))
    tokenized = table.map(process, remove_columns=["text"], num_proc=workers)
    total = int(np.sum(tokenized["len"], dtype=np.uint64))
    array = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(total,))
    at = 0
    for number in range(64):
        batch = tokenized.shard(num_shards=64, index=number, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        array[at : at + len(ids)] = ids
        at += len(ids)
    array.flush()


def _datatrove(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    lines = corpus.read_bytes().splitlines(keepends=True)
    parts = out / "parts"
    parts.mkdir(parents=True)
    for number in range(workers):  # datatrove's unit of parallel work is a file
        (parts / f"{number}.jsonl").write_bytes(b"".join(lines[number::workers]))
    tokenizer = DocumentTokenizer(
        output_folder=str(out / "tokens"),
        tokenizer_name_or_path=str(tokenizer_file),
        eos_token="<|endoftext|>",
        shuffle_documents=False,
    )
    LocalPipelineExecutor([JsonlReader(str(parts)), tokenizer], tasks=workers, workers=workers).run()


_WAYS: dict[str, tuple[str, Callable[[Path, Path, Path, int], None]]] = {
    "ours": ("data_prep", _ours),
    "nanogpt": ("datasets", _nanogpt),
    "datatrove": ("datatrove", _datatrove),
}


def main() -> None:
    """Makes the corpus, then runs each way on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _texts(arguments.megabytes * 1_000_000)
        size = sum(len(text.encode()) for text in texts)
        corpus, tokenizer_file = folder / "corpus.jsonl", folder / "tokenizer.json"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        _train(tokenizer_file, texts)
        raw = _raw(tokenizer_file, texts)
        print(f"raw: {raw / 1e6:.2f} MB/s on one core")
        rates: dict[str, float] = {}
        for way in arguments.ways:
            package, run = _WAYS[way]
            if importlib.util.find_spec(package) is None:
                print(f"{way}: {package} is not installed")
                continue
            (folder / way).mkdir()
            begun = time.perf_counter()
            run(corpus, tokenizer_file, folder / way, arguments.workers)
            rates[way] = size / (time.perf_counter() - begun)
            line = f"{way}: {rates[way] / 1e6:.2f} MB/s with {arguments.workers} workers"
            if way == "ours":
                line += f"; {rates[way] / (raw * arguments.workers):.2f} of raw x {arguments.workers}"
            elif "ours" in rates:
                line += f"; ours is {rates['ours'] / rates[way]:.2f} times as fast"
            print(line)


if __name__ == "__main__":
    main()
