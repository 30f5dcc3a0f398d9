"""What each subcommand does with its arguments."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import combine, show, training
from data_prep import verify as verification
from data_prep.errors import DataError
from data_prep.filters import Filters
from data_prep.manifest import REPORT_NAME, Manifest, load_manifest
from data_prep.sources import stdlib
from data_prep.sources.corpus import Corpus, TableSource
from data_prep.sources.files import InputFile, find_files, listing_fingerprint
from data_prep.sources.records import LargeRecord, Reading, Rejected
from data_prep.tokenizer import TokenizerSpec, load_spec
from data_prep.tokenizing.job import Job, finished_manifest
from data_prep.tokenizing.job import tokenize as run_job
from data_prep.tokenizing.pool import default_workers
from data_prep.tokenizing.ranks import find_rank


def _corpus(arguments: argparse.Namespace) -> Corpus:
    if arguments.text_unit != "file" and arguments.source:
        raise DataError(f"--text-unit {arguments.text_unit}: {arguments.source} has a document per file")
    reading = Reading(
        text_unit=arguments.text_unit,
        text_field=arguments.text_field,
        id_field=arguments.id_field,
        max_record_bytes=arguments.max_record_bytes,
        keep_fields=arguments.filter is not None,
    )
    sizes = {key: getattr(arguments, key) for key in ("piece_bytes", "shard_bytes") if hasattr(arguments, key)}
    if arguments.hf:
        table = TableSource(arguments.hf, arguments.hf_config, arguments.hf_split, arguments.hf_streaming)
        return Corpus((), reading, table, **sizes).with_table()
    if arguments.source:
        root = stdlib.stdlib_root()
        files = [
            InputFile(path, path.relative_to(root).as_posix(), path.stat().st_size, "text", "")
            for path in stdlib.stdlib_files(root)
        ]
    else:
        files = find_files(arguments.input)
    return Corpus(tuple(files), reading, **sizes)


def _filters(arguments: argparse.Namespace) -> Filters:
    return Filters(arguments.min_chars, arguments.max_chars, arguments.filter)


def _corpus_settings(arguments: argparse.Namespace, filters: Filters) -> dict[str, Any]:
    keys = ["source", "hf", "hf_config", "hf_split", "text_unit", "text_field", "max_record_bytes"]
    return {**{key: getattr(arguments, key) for key in keys}, **filters.settings()}


def _texts(corpus: Corpus, filters: Filters) -> Iterator[str]:
    """Documents for the trainer; a huge one in parts."""
    predicate = filters.load()
    spill = Path(os.environ.get("TMPDIR", "/tmp"))
    for span in corpus.spans():
        for piece in corpus.pieces(span, spill):
            for outcome in piece.outcomes(corpus.reading):
                if isinstance(outcome, Rejected):
                    continue
                if isinstance(outcome, LargeRecord):
                    yield from outcome.chunks()
                elif filters.reason(outcome.text, len(outcome.text), outcome.fields or {}, predicate) is None:
                    yield outcome.text


def _sampled(texts: Iterator[str], fraction: float, budget: int) -> Iterator[str]:
    """About `fraction` of the texts, chosen by their hash, up to `budget` bytes."""
    used = 0
    for text in texts:
        utf8 = text.encode()
        key = int.from_bytes(hashlib.blake2b(utf8, digest_size=8, person=b"deeploop-sample").digest(), "little")
        if key < fraction * 2.0**64:
            used += len(utf8)
            if used > budget:
                return
            yield text


def train_tokenizer(arguments: argparse.Namespace) -> None:
    """`train-tokenizer`: writes the model file, or says that it is there already."""
    corpus = _corpus(arguments)
    filters = _filters(arguments)
    settings: dict[str, Any] = {
        **_corpus_settings(arguments, filters),
        "inputs": listing_fingerprint(corpus.files),
        "vocab_size": arguments.vocab_size,
        "model_type": arguments.model_type,
        "train_bytes": arguments.train_bytes,
    }
    if training.is_finished(arguments.out, settings):
        print(f"{arguments.out}: already trained with these settings")
        return
    size = sum(file.size for file in corpus.files if file.kind != "table")
    fraction = min(1.0, arguments.train_bytes / max(1, size))
    texts = _sampled(_texts(corpus, filters), fraction, arguments.train_bytes)
    model = training.train_sentencepiece(texts, arguments.vocab_size, arguments.model_type)
    training.save_trained(arguments.out, model, settings)
    print(f"{arguments.out}: {arguments.vocab_size} pieces ({arguments.model_type})")


def _command(arguments: argparse.Namespace) -> str:
    """The command without what cannot change the result (--out, --workers)."""
    parts = ["python", "-m", "data_prep", "tokenize"]
    for key, value in sorted(vars(arguments).items()):
        if key in ("run", "command", "out", "workers", "local_rank") or value is None or value is False:
            continue
        parts.append(f"--{key.replace('_', '-')}")
        if value is not True:
            parts += map(str, value if isinstance(value, list) else [value])
    return shlex.join(parts)


def tokenize(arguments: argparse.Namespace) -> None:
    """`tokenize`: makes the dataset, goes on with it, or says that it is there already."""
    rank = find_rank(os.environ)
    corpus = _corpus(arguments)
    filters = _filters(arguments)
    filters.load()
    spec = TokenizerSpec(arguments.tokenizer, arguments.eos, arguments.tiktoken_encoding, arguments.backend)
    tokenizer = load_spec(spec)
    if arguments.add_bos and tokenizer.bos_id is None:
        raise DataError(f"--add-bos: {arguments.tokenizer} has no BOS token")
    if arguments.backend == "gigatoken":
        from data_prep.tokenizer_gigatoken import SAMPLE_CHARS, GigatokenTokenizer

        assert isinstance(tokenizer, GigatokenTokenizer)
        tokenizer.compare(_first_chars(_texts(corpus, filters), SAMPLE_CHARS))
    settings = {
        **_corpus_settings(arguments, filters),
        "document_rule": "bos text eos" if arguments.add_bos else "text eos",
        "validation_fraction": arguments.validation_fraction,
        "deduplicate": arguments.deduplicate,
        "shard_bytes": arguments.shard_bytes,
        "piece_bytes": arguments.piece_bytes,
        "backend": tokenizer.record().backend,
    }
    job = Job(
        corpus=corpus,
        tokenizer=tokenizer,
        tokenizer_spec=spec,
        out=arguments.out,
        name=arguments.name or arguments.source or arguments.out.resolve().name,
        filters=filters,
        validation_fraction=arguments.validation_fraction,
        add_bos=arguments.add_bos,
        deduplicate=arguments.deduplicate,
        strict=arguments.strict,
        settings=settings,
        command=_command(arguments),
    )
    if finished_manifest(job, job.inputs()) is not None:
        print(f"{arguments.out}: already finished with these inputs and settings")
        return
    manifest = run_job(job, rank, arguments.workers or default_workers(rank.processes_here))
    if manifest is not None:
        _print_summary(arguments.out, manifest)


def _first_chars(texts: Iterator[str], budget: int) -> Iterator[str]:
    used = 0
    for text in texts:
        yield text[: budget - used]
        used += len(text)
        if used >= budget:
            return


def _print_summary(out: Path, manifest: Manifest) -> None:
    for name, split in manifest.splits.items():
        text_bytes = "" if split.text_bytes is None else f", {split.text_bytes:,} bytes of text"
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents{text_bytes}")
    if manifest.rejected:
        counts = ", ".join(f"{reason} {count:,}" for reason, count in manifest.rejected.items())
        print(f"left out: {counts} (faults are listed in {out / REPORT_NAME})")


def verify(arguments: argparse.Namespace) -> None:
    """`verify`: prints each problem; fails if there is one."""
    found = 0
    for found, problem in enumerate(verification.problems(arguments.folder), 1):  # noqa: B007
        print(problem)
    if found:
        raise DataError(f"{arguments.folder}: {found} problems")
    print(f"{arguments.folder}: every checksum, index, token and count agrees with the manifest")


def inspect(arguments: argparse.Namespace) -> None:
    """`inspect`: the manifest in short, then documents."""
    manifest = load_manifest(arguments.folder)
    tokenizer = manifest.tokenizer
    print(f"{manifest.name}: {manifest.dtype}, {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
    print(f"fingerprint {manifest.fingerprint}")
    _print_summary(arguments.folder, manifest)
    documents = show.documents_as_text(arguments.folder, arguments.split, arguments.document, arguments.count)
    for number, tokens, text in documents:
        print(f"--- {arguments.split} document {number}: {tokens:,} tokens, {len(text):,} characters")
        print(text)


def merge(arguments: argparse.Namespace) -> None:
    """`merge`: one dataset of several."""
    name = arguments.name or arguments.out.resolve().name
    _print_summary(arguments.out, combine.merge(arguments.folders, arguments.out, name))


def convert(arguments: argparse.Namespace) -> None:
    """`convert`: to or from a foreign format."""
    if arguments.to is not None:
        if arguments.dataset is None:
            raise DataError("convert --to needs --dataset FOLDER")
        for path in combine.export(arguments.dataset, arguments.to, arguments.out):
            print(path)
        return
    if arguments.vocab_size is None or arguments.eos_id is None or not arguments.train:
        raise DataError("convert --from needs --train FILE..., --vocab-size and --eos-id")
    files = {"train": arguments.train, "validation": arguments.validation}
    name = arguments.out.resolve().name
    manifest = combine.import_foreign(
        files, arguments.source_format, arguments.out, name, arguments.vocab_size, arguments.eos_id
    )
    _print_summary(arguments.out, manifest)


def adopt(arguments: argparse.Namespace) -> None:
    """`adopt`: a manifest for foreign Megatron pairs."""
    prefixes = {"train": arguments.train, "validation": arguments.validation}
    folder = arguments.folder
    name = folder.resolve().name
    manifest = combine.adopt(prefixes, folder, name, arguments.vocab_size, arguments.eos_id, arguments.tokenizer)
    _print_summary(folder, manifest)
