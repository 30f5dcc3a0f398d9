"""The tokenization job of one process: its shards, and for process 0 the merge.

folder/.building/job.json           settings of the job that began here
folder/.building/shard-00000/       a shard on its way (see `data_prep.tokenizing.shard`)
folder/.building/rank-00000.lock    held by the process of that rank
folder/manifest.json                written last; its presence means finished
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.durable import make_folder, write_atomic
from data_prep.errors import DataError
from data_prep.filters import Filters
from data_prep.manifest import BUILDING, MANIFEST_NAME, Inputs, Manifest, load_manifest
from data_prep.megatron import dtype_for_vocab
from data_prep.sources.corpus import Corpus, Span
from data_prep.sources.files import listing_fingerprint
from data_prep.sources.pieces import Piece
from data_prep.tokenizer import Tokenizer, TokenizerSpec
from data_prep.tokenizing import dedup
from data_prep.tokenizing.merge import write_dataset
from data_prep.tokenizing.pool import Pool, worker_pool
from data_prep.tokenizing.progress import Display
from data_prep.tokenizing.ranks import Meeting, Rank
from data_prep.tokenizing.shard import ShardWriter
from data_prep.tokenizing.worker import WorkerSetup, hash_piece, tokenize_piece


@dataclass(frozen=True)
class Job:
    """All that a tokenization needs. `settings` holds what determines the result beyond inputs and tokenizer."""

    corpus: Corpus
    tokenizer: Tokenizer
    tokenizer_spec: TokenizerSpec
    out: Path
    name: str
    validation_fraction: float
    add_bos: bool
    filters: Filters
    deduplicate: bool
    strict: bool
    settings: dict[str, Any]
    command: str

    @property
    def building(self) -> Path:
        """Folder of the unfinished parts."""
        return self.out / BUILDING

    def shard_folder(self, number: int) -> Path:
        """Folder of one unfinished shard."""
        return self.building / f"shard-{number:05}"

    def inputs(self) -> Inputs:
        """What is to be read; its content is not hashed yet."""
        files = self.corpus.files
        size = sum(file.size for file in files if file.kind != "table")
        return Inputs(len(files), size, listing_fingerprint(files), content="")

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        """What two runs must share to give the same dataset."""
        record = self.tokenizer.record()
        tokenizer = {"tokenizer": record.sha256, "vocab_size": record.vocab_size, "eos_id": record.eos_id}
        return {"name": self.name, "inputs": inputs.fingerprint, **tokenizer, **self.settings}


def finished_manifest(job: Job, inputs: Inputs) -> Manifest | None:
    """The manifest of this very dataset if `job.out` holds it already.

    Raises:
        DataError: it holds another one.
    """
    if not (job.out / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(job.out)
    record = manifest.tokenizer
    found = {
        "name": manifest.name,
        "inputs": manifest.inputs.fingerprint,
        "tokenizer": record.sha256,
        "vocab_size": record.vocab_size,
        "eos_id": record.eos_id,
        **manifest.settings,
    }
    _require_same(job.out, "a finished dataset", found, job.identity(inputs))
    with suppress(OSError):
        shutil.rmtree(job.building)  # left by a process that ended just after writing the manifest
    return manifest


def _require_same(folder: Path, what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            raise DataError(
                f"{folder}: holds {what} with {key} = {found.get(key)!r}, now {wanted.get(key)!r}; give another --out"
            )


def _begin(job: Job, rank: Rank, inputs: Inputs, meeting: Meeting) -> None:
    """Rank 0 writes down what is being made; every rank makes sure that it sees the same."""
    path = job.building / "job.json"
    wanted = json.loads(json.dumps(job.identity(inputs)))
    if rank.rank == 0 and not path.exists():
        write_atomic(path, json.dumps(wanted).encode())
    meeting.wait(path.exists, f"{path}: waiting for rank 0")
    what = "an unfinished dataset" if rank.rank == 0 else f"(seen from rank {rank.rank}) an unfinished dataset"
    _require_same(job.out, what, json.loads(path.read_bytes()), wanted)


def _reject_if_strict(job: Job, rejected: list[Any]) -> None:
    if job.strict and rejected:
        first = rejected[0]
        place = first.place
        where = f"line {place.line}" if place.line else f"row {place.row}" if place.row else f"byte {place.offset or 0}"
        raise DataError(f"{place.file}: {first.reason} at {where} {first.detail}".rstrip() + " (--strict)")


def _hash_shard(job: Job, pool: Pool, span: Span, number: int, spill: Path) -> None:
    folder = job.shard_folder(number)
    make_folder(folder)
    if dedup.is_hashed(folder):
        return
    tasks = ((None, (piece,)) for piece in job.corpus.pieces(span, spill))
    dedup.write_hashes(folder, (result for _, result in pool.in_order(hash_piece, tasks)))


def _tokenize_shard(job: Job, pool: Pool, span: Span, number: int, spill: Path, display: Display) -> None:
    folder = job.shard_folder(number)
    if (folder / "done.json").exists():
        display.skip(job.corpus.input_bytes(span))
        return
    writer = ShardWriter(folder)
    duplicates = dedup.Duplicates(folder) if job.deduplicate else None
    display.skip(writer.progress.input_bytes)
    done = writer.progress.pieces

    def tasks() -> Iterator[tuple[Piece, tuple[Piece, frozenset[int]]]]:
        for piece_number, piece in enumerate(job.corpus.pieces(span, spill)):
            if piece_number >= done:
                yield piece, (piece, duplicates.of_piece(piece_number) if duplicates else frozenset())

    try:
        for piece, result in pool.in_order(tokenize_piece, tasks()):
            _reject_if_strict(job, result.rejected)
            writer.add(result, piece.input_bytes)
            display.add(piece.input_bytes, result)
        writer.finish(dtype_for_vocab(job.tokenizer.vocab_size))
    finally:
        writer.close()


def _build(job: Job, rank: Rank, workers: int, inputs: Inputs, meeting: Meeting) -> Manifest | None:
    _begin(job, rank, inputs, meeting)
    spans = job.corpus.spans()
    mine = [(number, span) for number, span in enumerate(spans) if number % rank.world_size == rank.rank]
    folders = [job.shard_folder(number) for number in range(len(spans))]
    spill = job.building / f"spill-{rank.rank:05}"
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir()
    setup = WorkerSetup(
        tokenizer=job.tokenizer_spec,
        add_bos=job.add_bos,
        dtype=dtype_for_vocab(job.tokenizer.vocab_size),
        reading=job.corpus.reading,
        filters=job.filters,
        validation_fraction=job.validation_fraction,
        spill=spill,
    )
    with worker_pool(setup, workers) as pool:
        if job.deduplicate:
            for number, span in mine:
                _hash_shard(job, pool, span, number, spill)
            marker = job.building / "duplicates.done"
            if rank.rank == 0 and not marker.exists():
                meeting.wait(lambda: all(dedup.is_hashed(folder) for folder in folders), "hashing")
                dedup.find_duplicates(folders)
                write_atomic(marker, b"")
            meeting.wait(marker.exists, "finding duplicates")
        total = sum(job.corpus.input_bytes(span) for _, span in mine)
        with Display(total, rank, unit="row" if job.corpus.table_source else "B") as display:
            for number, span in mine:
                _tokenize_shard(job, pool, span, number, spill, display)
    if rank.rank != 0:
        return None
    meeting.wait(lambda: all((folder / "done.json").exists() for folder in folders), "waiting for the other ranks")
    return write_dataset(job.out, folders, job.corpus, job.tokenizer.file, _manifest_of(job, inputs))


def _manifest_of(job: Job, inputs: Inputs) -> Manifest:
    return Manifest(
        name=job.name,
        document_rule="bos text eos" if job.add_bos else "text eos",
        dtype=dtype_for_vocab(job.tokenizer.vocab_size),
        tokenizer=job.tokenizer.record(),
        splits={},
        inputs=inputs,
        rejected={},
        settings=job.settings,
        command=job.command,
    )


def tokenize(job: Job, rank: Rank, workers: int) -> Manifest | None:
    """Makes the dataset, or goes on where an earlier process stopped. Ranks other than 0 return None when done.

    Raises:
        DataError: the folder is in use or holds something else, no document survives, `strict` met a fault, a
            worker or another rank failed, or the disk is full.
    """
    inputs = job.inputs()
    if (manifest := finished_manifest(job, inputs)) is not None:
        return manifest
    try:
        make_folder(job.building)
        meeting = Meeting(job.building, rank)
    except OSError as error:
        raise DataError(f"{job.building}: cannot be written ({error.strerror})") from error
    try:
        if (manifest := finished_manifest(job, inputs)) is not None:
            return manifest
        manifest = _build(job, rank, workers, inputs, meeting)
    except OSError as error:
        message = f"{error.filename or job.out}: {error.strerror or error}; run the same command again to go on"
        with suppress(OSError):
            meeting.report_failure(message)
        raise DataError(message) from error
    except DataError as error:
        meeting.report_failure(str(error))
        raise
    finally:
        meeting.close()
    if manifest is not None:
        shutil.rmtree(job.building, ignore_errors=True)
    return manifest
