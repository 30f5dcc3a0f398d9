"""`manifest.json`: what a dataset folder holds, where it came from, and how to check it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.durable import write_atomic
from data_prep.errors import DataError
from data_prep.megatron import TOKEN_DTYPES

FORMAT = "deeploop-tokens"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
BUILDING = ".building"  # folder of a dataset that is not finished
REPORT_NAME = "rejected.jsonl"  # what was left out for a fault, a line each


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made the tokens."""

    kind: str  # sentencepiece | huggingface | tiktoken
    file: str | None  # inside the dataset folder; None for adopted data whose tokenizer is not known
    sha256: str | None
    backend: str  # the library that ran, with its release
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    options: dict[str, str]  # what else is needed to load the file: `eos`, `encoding`


@dataclass(frozen=True)
class Shard:
    """One `.bin`/`.idx` pair; sizes in bytes, checksums SHA-256."""

    prefix: str  # path inside the folder, without suffix
    tokens: int
    documents: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True)
class Split:
    """One split: the concatenation of its shards, in order."""

    tokens: int
    documents: int
    text_bytes: int | None  # UTF-8 bytes of the tokenized text, for bits per byte; None when not known
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Inputs:
    """What was read: `fingerprint` covers names, sizes and samples of the files (`sources.files`), `content` every
    document's text in order."""

    files: int
    bytes: int
    fingerprint: str
    content: str


@dataclass(frozen=True)
class Manifest:
    """The typed content of `manifest.json`; nothing in it depends on worker counts, machines or the time."""

    name: str
    document_rule: str  # how a document becomes tokens: "text eos" or "bos text eos"
    dtype: str  # a key of megatron.TOKEN_DTYPES
    tokenizer: TokenizerRecord
    splits: dict[str, Split]
    inputs: Inputs
    rejected: dict[str, int]  # documents left out, by reason
    settings: dict[str, Any]  # everything else that determines the tokens
    command: str

    @property
    def separator_id(self) -> int | None:
        """The token before every document: BOS where documents begin with it, otherwise EOS of the one before."""
        tokenizer = self.tokenizer
        return tokenizer.bos_id if self.document_rule.startswith("bos") else tokenizer.eos_id

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what determines the token stream: dtype, tokenizer, each shard's checksum in order."""
        content = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "tokenizer": [self.tokenizer.sha256, self.tokenizer.vocab_size, self.tokenizer.eos_id],
            "splits": {
                name: [[shard.tokens, shard.bin_sha256] for shard in split.shards]
                for name, split in sorted(self.splits.items())
            },
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes `manifest.json` atomically; its presence is what makes a folder a finished dataset."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomic(folder / MANIFEST_NAME, text.encode("utf-8", "surrogateescape"))


def load_manifest(folder: Path) -> Manifest:
    """Reads a dataset folder's manifest.

    Raises:
        DataError: the folder holds no manifest (not a dataset, or unfinished), or one of another format.
    """
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        unfinished = (folder / BUILDING).exists()
        reason = (
            "its tokenization has not finished; run the same tokenize command again"
            if unfinished
            else "not a dataset folder; make one with `python -m data_prep tokenize`"
        )
        raise DataError(f"{folder}: no {MANIFEST_NAME} ({reason})") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path}: its `format` is not {FORMAT!r}, so another program wrote it")
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version {content.get('format_version')!r}; this release reads {FORMAT_VERSION}: "
            "tokenize the corpus again"
        )
    try:
        manifest = Manifest(
            name=content["name"],
            document_rule=content["document_rule"],
            dtype=content["dtype"],
            tokenizer=TokenizerRecord(**content["tokenizer"]),
            splits={
                name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
                for name, split in content["splits"].items()
            },
            inputs=Inputs(**content["inputs"]),
            rejected=content["rejected"],
            settings=content["settings"],
            command=content["command"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: a field is missing or wrong ({error})") from error
    if manifest.dtype not in TOKEN_DTYPES:
        raise DataError(f"{path}: dtype {manifest.dtype!r}; expected one of {sorted(TOKEN_DTYPES)}")
    return manifest
