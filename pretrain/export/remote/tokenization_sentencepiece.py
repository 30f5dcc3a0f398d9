"""SentencePiece models in exported folders."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sentencepiece

from pretrain.export.remote.tokenization_base import ExactTokenizer

META_SPACE = "\u2581"  # how SentencePiece spells a space inside its pieces


class DeepLoopSentencePieceTokenizer(ExactTokenizer):
    """A SentencePiece `.model`; with byte pieces and without a space in front, a literal U+2581 is its three bytes."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012  as above

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in META_SPACE.encode()]
        adds_space = self._model.encode("a", out_type=str)[0].startswith(META_SPACE)
        exact = not adds_space and all(self._model.is_byte(id_) for id_ in byte_ids)
        self._meta_space_ids: list[int] | None = byte_ids if exact else None
        super().__init__(vocab_file, **kwargs)

    @cached_property
    def _spellings(self) -> dict[int, str]:
        return {id_: self._model.id_to_piece(id_) for id_ in range(self._model.vocab_size())}

    def _encode_text(self, text: str) -> list[int]:
        if self._meta_space_ids is None:
            ids: list[int] = self._model.encode(text)
            return ids
        first, *rest = text.split(META_SPACE)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._meta_space_ids + self._model.encode(part)
        return ids

    def _decode_ids(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text
