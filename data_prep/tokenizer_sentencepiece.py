"""SentencePiece models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import TokenizerRecord
from data_prep.tokenizer import ids_array

_META_SPACE = "\u2581"  # how SentencePiece spells a space inside its pieces


class SentencePieceTokenizer:
    """A SentencePiece `.model`.

    SentencePiece writes a space as U+2581 and so would read back a literal U+2581 as a space. Where the model
    allows it (byte fallback, no dummy prefix) that character is encoded by its three bytes instead.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.file = path
        self._release = sentencepiece.__version__
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a SentencePiece model ({' '.join(str(error).split())})") from error
        self.vocab_size: int = self._model.vocab_size()
        self.eos_id: int = self._model.eos_id()
        if self.eos_id < 0:
            raise DataError(f"{path}: the model has no EOS piece; documents could not be told apart")
        bos: int = self._model.bos_id()
        self.bos_id = bos if bos >= 0 else None
        self.adds_prefix_space: bool = self._model.encode("a", out_type=str)[0].startswith(_META_SPACE)
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        exact = not self.adds_prefix_space and all(self._model.is_byte(id_) for id_ in byte_ids)
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

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        if self._meta_space_ids is None or not any(_META_SPACE in text for text in texts):
            return list(map(ids_array, self._model.encode(texts, num_threads=1)))
        return [ids_array(self.encode(text)) for text in texts]

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text

    def record(self) -> TokenizerRecord:
        return TokenizerRecord(
            kind="sentencepiece",
            file=self.file.name,
            sha256=sha256_of_file(self.file),
            backend=f"sentencepiece {self._release}",
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            bos_id=self.bos_id,
            options={},
        )
