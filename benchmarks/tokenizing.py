"""How fast is `tokenize`, end to end?

    python -m benchmarks.tokenizing [--megabytes 120] [--workers 2] [--rounds 1]

On one corpus (JSON lines of the standard library's sources), one tokenizer (a byte-level BPE trained here) and the
same cores it prints
  - the raw speed of the tokenizer library: one process that does nothing but encode, in the library's fastest way,
    and as many such processes at once as there are workers (what the cores give together);
  - `tokenize` with the library (ours) and with gigatoken (ours-gigatoken), each with all that it does;
  - nanoGPT's step (`datasets.map` with `num_proc`, then a memory map, as in data/openwebtext/prepare.py);
  - datatrove's DocumentTokenizer (`pip install datatrove[processing]==0.10.1 orjson`);
and the ratios between them, by the clock and by CPU time, which other work on the machine disturbs less. Start-up of
every way is in its time. The ways run in turn, round after round; of the rounds the median counts.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from benchmarks.corpus import texts, train_tokenizer

_RAW_BATCH = 64  # documents
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): orphans become ours, so that their CPU time can be counted


class Rate(NamedTuple):
    """Bytes per second of the clock, and of CPU time."""

    clock: float
    cpu: float


def _encode_only(corpus: Path, tokenizer_file: Path, size: int) -> tuple[float, float]:
    """Bytes per second, and per CPU second, of a process that does nothing but encode; `size` bytes of the corpus."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    documents = []
    with corpus.open() as lines:
        while size > 0:
            documents.append(json.loads(next(lines))["text"])
            size -= len(documents[-1])
    begun, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(documents), _RAW_BATCH):
        for one in tokenizer.encode_batch_fast(documents[start : start + _RAW_BATCH], add_special_tokens=False):
            one.ids  # noqa: B018 (the ids become a list here)
    done = sum(len(text.encode()) for text in documents)
    return done / (time.perf_counter() - begun), done / (time.process_time() - cpu)


def _raw(corpus: Path, tokenizer_file: Path, size: int, processes: int) -> Rate:
    """So many processes at once: the sum by the clock, the mean by CPU time."""
    with get_context("spawn").Pool(processes) as pool:
        found = pool.starmap(_encode_only, [(corpus, tokenizer_file, size // 4)] * processes)
    return Rate(sum(wall for wall, _ in found), sum(cpu for _, cpu in found) / processes)


def _tokenize(corpus: Path, tokenizer_file: Path, out: Path, workers: int, backend: str) -> None:
    options = ["--input", corpus, "--tokenizer", tokenizer_file, "--out", out / "data", "--workers", workers]
    command = [sys.executable, "-m", "data_prep", "tokenize", "--backend", backend, *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _ours(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    _tokenize(corpus, tokenizer_file, out, workers, "reference")


def _ours_gigatoken(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    _tokenize(corpus, tokenizer_file, out, workers, "gigatoken")


def _nanogpt(corpus: Path, tokenizer_file: Path, out: Path, workers: int) -> None:
    import datasets

    datasets.disable_progress_bars()
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

    tokenizer = DocumentTokenizer(
        output_folder=str(out / "tokens"),
        tokenizer_name_or_path=str(tokenizer_file),
        eos_token="<|endoftext|>",
        shuffle_documents=False,
    )
    reader = JsonlReader(str(_parts(corpus, workers)))
    LocalPipelineExecutor([reader, tokenizer], tasks=workers, workers=workers, logging_dir=str(out / "logs")).run()


def _parts(corpus: Path, count: int) -> Path:
    """The corpus as so many files, since datatrove's unit of parallel work is a file; made before the clock starts."""
    folder = corpus.parent / "parts"
    if not folder.exists():
        folder.mkdir()
        lines = corpus.read_bytes().splitlines(keepends=True)
        for number in range(count):
            (folder / f"{number}.jsonl").write_bytes(b"".join(lines[number::count]))
    return folder


_WAYS: dict[str, tuple[str, Callable[[Path, Path, Path, int], None]]] = {
    "ours": ("data_prep", _ours),
    "ours-gigatoken": ("gigatoken", _ours_gigatoken),
    "nanogpt": ("datasets", _nanogpt),
    "datatrove": ("datatrove", _datatrove),
}


def _timed(way: str, arguments: list[str], size: int) -> Rate:
    """Runs one way in a process of its own; CPU time counts all that it starts, also what outlives it."""
    before, begun = os.times(), time.perf_counter()
    line = [sys.executable, "-m", "benchmarks.tokenizing", "--run", way, *arguments]
    done = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    elapsed = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{way} failed: {done.stderr[-2000:]}")
    time.sleep(1)  # for what is about to end; multiprocessing's own helper stays
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return Rate(size / elapsed, size / cpu)


def main() -> None:
    """Makes the corpus, then runs each way on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=120)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(_WAYS), default=list(_WAYS))
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workers = arguments.workers
    if arguments.run:
        way, *paths = arguments.run
        corpus, tokenizer_file, out = map(Path, paths)
        _WAYS[way][1](corpus, tokenizer_file, out, workers)
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer_file = folder / "corpus.jsonl", folder / "tokenizer.json"
        size = 0
        with corpus.open("w") as file:
            for text in texts(arguments.megabytes * 1_000_000):
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
        train_tokenizer(tokenizer_file)
        _parts(corpus, workers)
        ways = [way for way in arguments.ways if importlib.util.find_spec(_WAYS[way][0]) is not None]
        rates: dict[str, list[Rate]] = {}
        for _ in range(arguments.rounds):
            for processes in dict.fromkeys((1, workers)):
                rates.setdefault(f"raw x {processes}", []).append(_raw(corpus, tokenizer_file, size, processes))
            for way in ways:
                out = folder / way
                out.mkdir()
                call = [str(corpus), str(tokenizer_file), str(out), "--workers", str(workers)]
                rates.setdefault(way, []).append(_timed(way, call, size))
                shutil.rmtree(out)
        _report({way: Rate(*map(median, zip(*found, strict=True))) for way, found in rates.items()}, workers)


def _report(rates: dict[str, Rate], workers: int) -> None:
    for way, rate in rates.items():
        print(f"{way:>14}: {rate.clock / 1e6:7.2f} MB/s, {rate.cpu / 1e6:7.2f} MB per CPU second")
    alone, together = rates["raw x 1"], rates[f"raw x {workers}"]
    for way in (way for way in rates if way.startswith("ours")):
        rate = rates[way]
        clock, cpu = rate.clock / alone.clock / workers, rate.cpu / alone.cpu
        print(f"{way}: {clock:.2f} (CPU {cpu:.2f}) of one raw process x {workers}")
        clock, cpu = rate.clock / together.clock, rate.cpu / together.cpu
        print(f"{way}: {clock:.2f} (CPU {cpu:.2f}) of {workers} raw processes at once")
        for peer in ("nanogpt", "datatrove"):
            if peer in rates:
                clock, cpu = rate.clock / rates[peer].clock, rate.cpu / rates[peer].cpu
                print(f"{way}: {clock:.2f} (CPU {cpu:.2f}) times as fast as {peer}")


if __name__ == "__main__":
    main()
