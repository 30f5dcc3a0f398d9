"""What the tokenizers of exported folders share: ids are exactly those of training.

Tokens are encoded by the library that encoded the training data. A `tokenizer.json` cannot stand in for it: there two
merges to the same piece have an order among themselves, the text `<0x41>` can become a byte piece, and a literal
U+2581 is read as a space.

Text never becomes a special token: `</s>` in it is four characters. As in training, a text begins after the token
that separates documents, which `add_special_tokens=False` leaves out.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer


class ExactTokenizer(PreTrainedTokenizer, ABC):
    """Ids and spellings of tokens one to one; subclasses encode and decode.

    Args:
        vocab_file: the tokenizer's own file.
        add_bos_token: whether `bos_token`, the separator of documents, stands before a text.
        kwargs: the library's.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012  the library's name for it, and not typed there

    def __init__(self, vocab_file: str, add_bos_token: bool = True, **kwargs: Any) -> None:
        self.vocab_file = vocab_file
        self.add_bos_token = add_bos_token
        self._ids = {spelling: id_ for id_, spelling in self._spellings.items()}
        kwargs["split_special_tokens"] = True
        kwargs["clean_up_tokenization_spaces"] = False
        super().__init__(add_bos_token=add_bos_token, **kwargs)

    @property
    @abstractmethod
    def _spellings(self) -> dict[int, str]:
        """Every id with a spelling of its own."""

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of `text` taken literally."""

    @abstractmethod
    def _decode_ids(self, ids: list[int]) -> str:
        """Text of ids that are no special tokens."""

    @property
    def vocab_size(self) -> int:
        return max(self._spellings) + 1

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._spellings[id_] for id_ in self._encode_text(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._spellings.get(index, "")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens, with special ones as they are spelt."""
        special = set(self.all_special_tokens)
        text, run = "", list[int]()
        for token in tokens:
            if token in special:
                text += self._decode_ids(run) + token
                run = []
            elif token:  # empty for ids past the vocabulary
                run.append(self._ids[token])
        return text + self._decode_ids(run)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self.bos_token_id] * self.add_bos_token + token_ids_0 + (token_ids_1 or [])

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        special = {id_ for id_ in self.all_special_ids if id_ is not None}
        if already_has_special_tokens:
            return [int(id_ in special) for id_ in token_ids_0]
        return [1] * self.add_bos_token + [0] * len(token_ids_0 + (token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        name = Path(self.vocab_file).name
        target = Path(save_directory) / (f"{filename_prefix}-{name}" if filename_prefix else name)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
