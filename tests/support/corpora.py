"""Small corpora of every kind of file, and the command that tokenizes them."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

ROOT = Path(__file__).parents[2]
TIMEOUT = 900  # seconds; generous, since a busy machine is no fault of ours
SENTENCE = "the loop reads its own state again and writes 42 lines; größer than before\n\t{ x = y }"
WORDS = SENTENCE.split(" ")


def texts(count: int, seed: int) -> list[str]:
    """Documents of 5 to 60 words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(5, 60))) for _ in range(count)]


def write_corpus(folder: Path, documents: int = 300) -> Path:
    """Five inputs of different kinds, with a few bad records among them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}).encode() for text in texts(documents, 1)]
    lines[10], lines[20] = b'{"text": "cut', b'{"text": 5}'
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    packed = b"\n".join(json.dumps({"text": text}).encode() for text in texts(documents, 2))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(packed, mtime=0))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(packed))
    for number, text in enumerate(texts(documents // 10, 3)):
        (folder / f"d{number:03}.txt").write_text(text)
    (folder / "d010.txt").write_bytes(b"not \xff UTF-8")
    (folder / "e.json").write_text(json.dumps([{"text": text} for text in texts(documents, 4)]))
    pq.write_table(pa.table({"text": texts(documents, 5)}), folder / "f.parquet", row_group_size=40)
    return folder


def command(source: Path, model: Path, out: Path, *options: object) -> list[str]:
    """Command line of a tokenization in small pieces and shards."""
    sizes = ["--piece-bytes", "2000", "--shard-bytes", "20000", "--name", "corpus"]
    line = ["-m", "data_prep", "tokenize", "--input", source, "--tokenizer", model, "--out", out, *sizes, *options]
    return [sys.executable, *map(str, line)]


def run(line: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command from the project's root."""
    return subprocess.run(
        line, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=TIMEOUT
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of every file of a dataset folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
