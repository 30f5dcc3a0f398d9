"""Tokenizers behind one protocol. Text never becomes a special token: `</s>` in it is four characters."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.manifest import MANIFEST_NAME, TokenizerRecord, load_manifest


class Tokenizer(Protocol):
    """What the package asks of a tokenizer. `encode` adds no special token; `decode` inverts it."""

    file: Path
    vocab_size: int
    eos_id: int
    bos_id: int | None
    adds_prefix_space: bool  # whether "a" encodes as " a" would in the middle of a text

    def encode(self, text: str) -> list[int]:
        """Ids of `text` taken literally."""
        ...

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """`encode` of each text, on the calling thread."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; special tokens give nothing."""
        ...

    def record(self) -> TokenizerRecord:
        """The manifest's description of this tokenizer."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """How to load a tokenizer, in this or another process.

    `eos` names the token that ends a document where the file does not say it; `encoding` names the tiktoken split
    pattern where the file's name does not; `backend` is "reference" or "gigatoken".
    """

    path: Path
    eos: str | None = None
    encoding: str | None = None
    backend: str = "reference"


def ids_array(ids: list[int]) -> NDArray[np.uint32]:
    """The ids as an array, in less than half of numpy's own time for it."""
    return np.frombuffer(array("I", ids), dtype=np.uint32)


def load_spec(spec: TokenizerSpec) -> Tokenizer:
    """Loads a tokenizer file: SentencePiece `.model`, Hugging Face `.json`, tiktoken ranks `.tiktoken`.

    Raises:
        DataError: the file is missing, of an unknown kind, damaged, or has no token to end a document with.
    """
    path = spec.path
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file")
    reference: Tokenizer
    if path.suffix == ".model":
        from data_prep.tokenizer_sentencepiece import SentencePieceTokenizer

        reference = SentencePieceTokenizer(path)
    elif path.suffix == ".json":
        from data_prep.tokenizer_huggingface import HuggingFaceTokenizer

        reference = HuggingFaceTokenizer(path, spec.eos)
    elif path.suffix == ".tiktoken":
        from data_prep.tokenizer_tiktoken import TiktokenTokenizer

        reference = TiktokenTokenizer(path, spec.encoding)
    else:
        raise DataError(f"{path}: unknown kind of tokenizer; expected .model, tokenizer.json or .tiktoken")
    if spec.backend == "reference":
        return reference
    from data_prep.tokenizer_gigatoken import GigatokenTokenizer

    return GigatokenTokenizer(reference, spec)


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer file, or the one inside a dataset folder with the options recorded there.

    Raises:
        DataError: see `load_spec`; or the dataset was adopted without a tokenizer.
    """
    path = Path(path)
    if not path.is_dir():
        return load_spec(TokenizerSpec(path))
    manifest = load_manifest(path)
    if manifest.tokenizer.file is None:
        raise DataError(f"{path / MANIFEST_NAME}: names no tokenizer file (an adopted dataset)")
    options = manifest.tokenizer.options
    spec = TokenizerSpec(path / manifest.tokenizer.file)
    return load_spec(replace(spec, eos=options.get("eos"), encoding=options.get("encoding")))
