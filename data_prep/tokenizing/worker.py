"""What a worker process does: one piece of the corpus in, its tokens out."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection, parent_process
from pathlib import Path

from data_prep.filters import Filters, Predicate
from data_prep.megatron import TOKEN_DTYPES
from data_prep.segments import segments, segments_of_chunks
from data_prep.sources.pieces import Piece
from data_prep.sources.records import LargeRecord, Reading, Record, Rejected
from data_prep.split import SPLITS, SplitKey
from data_prep.tokenizer import Tokenizer, TokenizerSpec, load_spec
from data_prep.tokenizing.encoding import Encoder

_HASHED_BYTES = 16


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker must know."""

    tokenizer: TokenizerSpec
    add_bos: bool
    dtype: str
    reading: Reading
    filters: Filters
    validation_fraction: float
    spill: Path


@dataclass
class SplitPart:
    """One split's share of a piece: tokens (in memory or in a file), the documents' lengths, the text's bytes."""

    tokens: bytes | Path = b""
    lengths: bytes = b""  # int32
    text_bytes: int = 0


@dataclass
class PieceResult:
    """What a piece became. `content` is a hash over its documents' texts."""

    splits: dict[str, SplitPart]
    rejected: list[Rejected]
    left_out: Counter[str]  # by filters and deduplication, which are not faults and are not listed
    content: bytes


@dataclass
class PieceHashes:
    """Hash (16 bytes) of each document of a piece, for deduplication; `keys` (uint32) are its places in the piece."""

    hashes: bytes
    keys: bytes


class Worker:
    """State of a worker process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.tokenizer: Tokenizer = load_spec(setup.tokenizer)
        self.predicate: Predicate | None = setup.filters.load()
        self.dtype = TOKEN_DTYPES[setup.dtype]
        self.bos_id = self.tokenizer.bos_id if setup.add_bos else None

    def _parts(self, record: Record | LargeRecord) -> Iterator[str]:
        """Text of a document in parts that encode independently."""
        at_breaks = not self.tokenizer.adds_prefix_space
        if isinstance(record, Record):
            parts = segments(record.text, at_breaks)
        else:
            parts = segments_of_chunks(record.chunks(), at_breaks)
        for number, part in enumerate(parts):
            # Such a tokenizer puts back the space that the cut was made before.
            yield part.removeprefix(" ") if number and self.tokenizer.adds_prefix_space else part

    def _reason(self, record: Record | LargeRecord) -> str | None:
        filters = self.setup.filters
        if isinstance(record, Record):
            return filters.reason(record.text, len(record.text), record.fields or {}, self.predicate)
        length = sum(map(len, record.chunks()))
        # Only a predicate needs a large document as a whole.
        text = "".join(record.chunks()) if self.predicate else ""
        return filters.reason(text, length, {}, self.predicate)

    def _texts(self, record: Record | LargeRecord) -> Iterable[str]:
        return [record.text] if isinstance(record, Record) else record.chunks()

    def documents(
        self, piece: Piece, rejected: list[Rejected], left_out: Counter[str]
    ) -> Iterator[tuple[int, Record | LargeRecord]]:
        """Documents that pass, each with its place in the piece."""
        for key, outcome in enumerate(piece.outcomes(self.setup.reading)):
            if isinstance(outcome, Rejected):
                _append_rejected(rejected, outcome)
            elif (reason := self._reason(outcome)) is not None:
                left_out[reason] += 1
            else:
                yield key, outcome

    def tokens(self, piece: Piece, duplicates: frozenset[int]) -> PieceResult:
        """Tokenizes a piece, without the documents at the places in `duplicates`."""
        encoder = Encoder(self.tokenizer, self.bos_id, self.dtype, self.setup.spill)
        text_bytes = dict.fromkeys(SPLITS, 0)
        rejected: list[Rejected] = []
        left_out: Counter[str] = Counter()
        content = hashlib.blake2b(digest_size=32)
        for key, record in self.documents(piece, rejected, left_out):
            if key in duplicates:
                left_out["duplicate"] += 1
                continue
            split_key, size = SplitKey(), 0
            for text in self._texts(record):
                utf8 = text.encode()
                size += len(utf8)
                split_key.update(utf8)
                content.update(utf8)
            content.update(size.to_bytes(8, "little"))
            split = split_key.split(self.setup.validation_fraction)
            encoder.add(self._parts(record), split, record.place)
            text_bytes[split] += size
        parts = {split: SplitPart(*encoder.result(split), text_bytes[split]) for split in SPLITS}
        return PieceResult(parts, rejected, left_out, content.digest())

    def hashes(self, piece: Piece) -> PieceHashes:
        """Hashes of the documents that the filters keep."""
        hashes, keys = bytearray(), array("I")
        for key, record in self.documents(piece, [], Counter()):
            digest = hashlib.blake2b(digest_size=_HASHED_BYTES)
            for text in self._texts(record):
                digest.update(text.encode())
            hashes += digest.digest()
            keys.append(key)
        return PieceHashes(bytes(hashes), keys.tobytes())


def _append_rejected(rejected: list[Rejected], new: Rejected) -> None:
    """Keeps runs of blank lines and empty documents as one entry."""
    last = rejected[-1] if rejected else None
    if (
        last is not None
        and new.reason in ("blank_line", "empty")
        and (last.reason, last.place.file) == (new.reason, new.place.file)
        and last.place.line is not None
        and new.place.line == last.place.line + last.count
    ):
        rejected[-1] = replace(last, count=last.count + 1)
    else:
        rejected.append(new)


_worker: Worker | None = None


def start_worker(setup: WorkerSetup) -> None:
    """Initialises this process; it ends by itself when the main process is gone."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _worker = Worker(setup)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def tokenize_piece(piece: Piece, duplicates: frozenset[int]) -> PieceResult:
    """Task of the pool: `Worker.tokens`."""
    assert _worker is not None
    return _worker.tokens(piece, duplicates)


def hash_piece(piece: Piece) -> PieceHashes:
    """Task of the pool: `Worker.hashes`."""
    assert _worker is not None
    return _worker.hashes(piece)
