"""Tokenizers behind one protocol. Text never becomes a special token: `</s>` in it is four characters."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import MANIFEST_NAME, TokenizerRecord, load_manifest

_META_SPACE = "\u2581"  # how SentencePiece spells a space inside its pieces


class Tokenizer(Protocol):
    """What the package asks of a tokenizer. `encode` adds no special token; `decode` inverts it."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text` taken literally."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; special tokens give nothing."""
        ...

    def record(self) -> TokenizerRecord:
        """The manifest's description of this tokenizer."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece `.model`.

    SentencePiece writes a space as U+2581 and so would read back a literal U+2581 as a space. Where the model
    allows it (byte fallback, no dummy prefix) that character is encoded by its three bytes instead.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._file = path
        self._release = sentencepiece.__version__
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a SentencePiece model ({error})") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eos_id: int = self._model.eos_id()
        if self.eos_id < 0:
            raise DataError(f"{path}: the model has no EOS piece; documents could not be told apart")
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        dummy_prefix = self._model.encode("a", out_type=str)[0].startswith(_META_SPACE)
        exact = not dummy_prefix and all(self._model.is_byte(id_) for id_ in byte_ids)
        self._meta_space_ids: list[int] | None = byte_ids if exact else None

    def encode(self, text: str) -> list[int]:
        if self._meta_space_ids is None or _META_SPACE not in text:
            ids: list[int] = self._model.encode(text)
            return ids
        first, *rest = text.split(_META_SPACE)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._meta_space_ids
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text

    def record(self) -> TokenizerRecord:
        bos = self._model.bos_id()
        return TokenizerRecord(
            kind="sentencepiece",
            file=self._file.name,
            sha256=sha256_of_file(self._file),
            backend=f"sentencepiece {self._release}",
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            bos_id=bos if bos >= 0 else None,
            rule="text eos",
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer file, or the one inside a dataset folder.

    Raises:
        DataError: the file is missing, of an unknown kind, or damaged.
    """
    path = Path(path)
    if path.is_dir():
        record = load_manifest(path).tokenizer
        if record.file is None:
            raise DataError(f"{path / MANIFEST_NAME}: names no tokenizer file (an adopted dataset)")
        path = path / record.file
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise DataError(f"{path}: unknown kind of tokenizer; expected a SentencePiece .model")
