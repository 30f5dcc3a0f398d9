"""How much memory does `tokenize` need?

    python -m benchmarks.memory [--megabytes 1000] [--documents 5000000] [--workers 2] [--backend gigatoken]

Tokenizes one document of so many megabytes (as a text file, as a JSON line, and compressed) and then very many small
documents, the latter also with deduplication; prints the sum of the peak resident memory of all processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.corpus import texts, train_tokenizer

_POLL_SECONDS = 0.02


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _peak_resident(pid: int) -> int:
    """Bytes; VmHWM of proc(5)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def peak_memory(command: list[str]) -> tuple[int, float]:
    """Runs a command; the sum of the peak resident memory of each process that it starts, and its seconds."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak_resident(pid))
        time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {process.communicate()[1]}")
    return sum(peaks.values()), time.monotonic() - begun


def _write_document(path: Path, size: int) -> None:
    with path.open("w") as file:
        for text in texts(size):
            file.write(text)


def _write_json_line(path: Path, size: int) -> None:
    with path.open("w") as file:
        file.write('{"text": "')
        for text in texts(size):
            file.write(json.dumps(text)[1:-1])
        file.write('"}\n')


def _write_compressed(path: Path, size: int) -> None:
    packer = zlib.compressobj(1, wbits=31)
    with path.open("wb") as file:
        for text in texts(size):
            file.write(packer.compress(text.encode()))
        file.write(packer.flush())


def _write_many(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(f"document {number * 7 % (count // 2)}\n")  # each twice


def main() -> None:
    """Runs each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", choices=["reference", "gigatoken"], default="gigatoken")
    arguments = parser.parse_args()
    size = arguments.megabytes * 1_000_000
    lines = ["--text-unit", "line"]
    cases: list[tuple[str, str, Callable[[Path, int], None], int, list[str]]] = [
        ("one document", "one.txt", _write_document, size, []),
        ("one JSON line", "one.jsonl", _write_json_line, size, []),
        ("one document, compressed", "one.txt.gz", _write_compressed, size, []),
        (f"{arguments.documents:,} documents", "many.txt", _write_many, arguments.documents, lines),
        ("the same, deduplicated", "many.txt", _write_many, arguments.documents, [*lines, "--deduplicate"]),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(folder / "tokenizer.json")
        for number, (what, file, write, amount, options) in enumerate(cases):
            write(folder / file, amount)
            out = folder / str(number)
            command = [sys.executable, "-m", "data_prep", "tokenize", "--input", folder / file, "--out", out, *options]
            command += ["--tokenizer", folder / "tokenizer.json", "--backend", arguments.backend]
            peak, seconds = peak_memory([*map(str, command), "--workers", str(arguments.workers)])
            print(f"{what}: {peak / 2**20:,.0f} MiB, {arguments.workers} workers, {seconds:.0f} s", flush=True)
            (folder / file).unlink()


if __name__ == "__main__":
    main()
