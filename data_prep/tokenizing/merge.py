"""From finished shards to a dataset folder: names, report, manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from data_prep.durable import atomic_file, fsync_folder, remove_leftovers
from data_prep.errors import DataError
from data_prep.manifest import REPORT_NAME, Manifest, Shard, Split
from data_prep.sources.corpus import Corpus
from data_prep.split import SPLITS

_READ_BYTES = 1 << 20


def _move(source: Path, target: Path, size: int) -> None:
    """Renames; a merge that was stopped may have done so already."""
    if source.exists():
        source.replace(target)
    elif not target.exists() or target.stat().st_size != size:
        raise DataError(f"{source}: gone, and {target} is not it; remove {source.parent} and run again")


def write_dataset(out: Path, folders: list[Path], corpus: Corpus, tokenizer_file: Path, manifest: Manifest) -> Manifest:
    """Moves the shards into place in corpus order and writes the manifest last.

    Raises:
        DataError: no document survived.
    """
    records: list[dict[str, Any]] = [json.loads((folder / "done.json").read_bytes()) for folder in folders]
    rejected: Counter[str] = Counter()
    content = sha256()
    for record in records:
        rejected.update(record["rejected"])
        content.update(record["content"].encode())
    if not any(record["splits"] for record in records):
        left_out = dict(sorted(rejected.items())) or "none"
        raise DataError(f"the corpus holds no document to tokenize ({len(corpus.files)} files; left out: {left_out})")
    splits = {}
    for split in SPLITS:
        shards: list[Shard] = []
        for folder, record in zip(folders, records, strict=True):
            if split not in record["splits"]:
                continue
            shard = Shard(**{**record["splits"][split], "prefix": f"{manifest.name}-{split}-{len(shards):05}"})
            _move(folder / f"{split}.bin", out / f"{shard.prefix}.bin", shard.bin_bytes)
            _move(folder / f"{split}.idx", out / f"{shard.prefix}.idx", shard.idx_bytes)
            shards.append(shard)
        if shards:
            splits[split] = Split(
                tokens=sum(shard.tokens for shard in shards),
                documents=sum(shard.documents for shard in shards),
                text_bytes=sum(record["text_bytes"][split] for record in records),
                shards=tuple(shards),
            )
    _write_report(out / REPORT_NAME, [folder / REPORT_NAME for folder in folders], corpus)
    _copy_file(tokenizer_file, out / tokenizer_file.name)
    remove_leftovers(out)
    fsync_folder(out)
    finished = replace(
        manifest,
        splits=splits,
        rejected=dict(sorted(rejected.items())),
        inputs=replace(manifest.inputs, content=content.hexdigest()),
    )
    finished.save(out)
    return finished


def _copy_file(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    with atomic_file(target) as file:
        file.write(source.read_bytes())


def _entries(reports: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for report in reports:
        with report.open("rb") as lines:
            yield from map(json.loads, lines)


def _write_report(path: Path, reports: list[Path], corpus: Corpus) -> None:
    """Joins the shards' reports. Lines of plain files are counted here, where the whole file is at hand."""
    files = {file.name: file.path for file in corpus.files}
    counter: tuple[str, _LineCounter] | None = None
    with atomic_file(path) as report:
        for entry in _entries(reports):
            if entry.get("offset") is not None and entry["file"] in files:
                if counter is None or counter[0] != entry["file"]:
                    counter = (entry["file"], _LineCounter(files[entry["file"]]))
                entry["line"] = counter[1].line_at(entry["offset"])
            report.write(json.dumps(entry).encode() + b"\n")


class _LineCounter:
    """Line number (from 1) at growing offsets of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._line = 1

    def line_at(self, offset: int) -> int:
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            while self._position < offset:
                data = stream.read(min(_READ_BYTES, offset - self._position))
                if not data:
                    break
                self._line += data.count(b"\n")
                self._position += len(data)
        return self._line
