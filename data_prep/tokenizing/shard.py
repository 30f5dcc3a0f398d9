"""One shard on its way: files that only grow, and a journal of how much of them counts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.durable import atomic_file, fsync_folder, make_folder, sha256_of_file, write_atomic
from data_prep.errors import DataError
from data_prep.manifest import REPORT_NAME, Shard
from data_prep.megatron import write_index
from data_prep.sources.records import Rejected
from data_prep.split import SPLITS
from data_prep.tokenizing.worker import PieceResult

_COMMIT_SECONDS = 1.0
_FILES = [*(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "lengths")), REPORT_NAME]


@dataclass
class Progress:
    """What the journal records: pieces done, valid bytes of each file, and running counts."""

    pieces: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FILES, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    rejected: dict[str, int] = field(default_factory=dict)
    content: str = ""
    input_bytes: int = 0


def _journal_line(progress: Progress) -> bytes:
    text = json.dumps(asdict(progress)).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _last_progress(journal: Path) -> Progress:
    """The last whole line whose files are all there; a line cut by a power failure does not count."""
    last = Progress()
    if not journal.exists():
        return last
    for line in journal.read_bytes().split(b"\n"):
        checksum, _, text = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            progress = Progress(**json.loads(text))
            files = [(journal.parent / name, size) for name, size in progress.sizes.items()]
            if all(size == 0 or (path.exists() and path.stat().st_size >= size) for path, size in files):
                last = progress
    return last


class ShardWriter:
    """Appends piece results to a shard's files in `folder`; resumes where the journal ends.

    Raises:
        DataError: another process holds this shard.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        self._lock = (folder / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is writing this shard") from error
        self.progress = _last_progress(folder / "journal")
        self._files: dict[str, BinaryIO] = {}
        for name in _FILES:
            stream = (folder / name).open("ab")
            stream.truncate(self.progress.sizes[name])
            self._files[name] = stream
        write_atomic(folder / "journal", _journal_line(self.progress))
        self._journal = (folder / "journal").open("ab")
        self._committed = time.monotonic()
        self._counts = Counter(self.progress.rejected)

    def add(self, result: PieceResult, input_bytes: int) -> None:
        """Appends a piece; makes it durable about once a second."""
        for split, part in result.splits.items():
            tokens = self._files[f"{split}.bin"]
            if isinstance(part.tokens, Path):
                with part.tokens.open("rb") as spilled:
                    shutil.copyfileobj(spilled, tokens, 1 << 20)
                part.tokens.unlink()
            else:
                tokens.write(part.tokens)
            self._files[f"{split}.lengths"].write(part.lengths)
            self.progress.text_bytes[split] += part.text_bytes
        for rejected in result.rejected:
            self._files[REPORT_NAME].write(_report_line(rejected))
            self._counts[rejected.reason] += rejected.count
        self._counts.update(result.left_out)
        self.progress.pieces += 1
        self.progress.input_bytes += input_bytes
        self.progress.content = sha256(self.progress.content.encode() + result.content).hexdigest()
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Forces the files, then a journal line that vouches for them, to disk."""
        for name, stream in self._files.items():
            stream.flush()
            os.fsync(stream.fileno())
            self.progress.sizes[name] = os.fstat(stream.fileno()).st_size
        self.progress.rejected = dict(sorted(self._counts.items()))
        self._journal.write(_journal_line(self.progress))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._committed = time.monotonic()

    def close(self) -> None:
        """Lets go of the files without finishing."""
        for stream in (*self._files.values(), self._journal, self._lock):
            stream.close()

    def finish(self, dtype: str) -> None:
        """Writes the indexes and then `done.json`, whose presence marks the shard as complete."""
        self.commit()
        record: dict[str, Any] = {**asdict(self.progress), "splits": {}}
        for split in SPLITS:
            lengths_file = self.folder / f"{split}.lengths"
            size = lengths_file.stat().st_size
            if not size:
                continue
            lengths = np.memmap(lengths_file, dtype="<i4", mode="r")
            index = self.folder / f"{split}.idx"
            with atomic_file(index) as file:
                write_index(file, dtype, lengths)
            tokens = self.folder / f"{split}.bin"
            record["splits"][split] = asdict(
                Shard(
                    prefix="",
                    tokens=int(lengths.sum(dtype=np.int64)),
                    documents=len(lengths),
                    bin_bytes=tokens.stat().st_size,
                    idx_bytes=index.stat().st_size,
                    bin_sha256=sha256_of_file(tokens),
                    idx_sha256=sha256_of_file(index),
                )
            )
        fsync_folder(self.folder)
        write_atomic(self.folder / "done.json", json.dumps(record).encode())
        self.close()


def _report_line(rejected: Rejected) -> bytes:
    place = {key: value for key, value in asdict(rejected.place).items() if value is not None}
    content = {**place, "reason": rejected.reason, "detail": rejected.detail, "count": rejected.count}
    return json.dumps(content).encode() + b"\n"
