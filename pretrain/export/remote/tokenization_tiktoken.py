"""tiktoken rank files in exported folders."""

from __future__ import annotations

import base64
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken

from pretrain.export.remote.tokenization_base import ExactTokenizer


class DeepLoopTiktokenTokenizer(ExactTokenizer):
    """A rank file under a split pattern. A token's spelling here is its bytes read as Latin-1.

    Args:
        pattern: the regular expression that cuts text before byte pairs are merged.
        end_of_text_id: id of `<|endoftext|>`.
    """

    vocab_files_names = {"vocab_file": "tokenizer.tiktoken"}  # noqa: RUF012  as above

    def __init__(self, vocab_file: str, pattern: str, end_of_text_id: int, **kwargs: Any) -> None:
        lines = (line.split() for line in Path(vocab_file).read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        special = {"<|endoftext|>": end_of_text_id}
        self._encoding = tiktoken.Encoding("exported", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self._ranks = ranks
        self._special = special
        super().__init__(vocab_file, pattern=pattern, end_of_text_id=end_of_text_id, **kwargs)

    @cached_property
    def _spellings(self) -> dict[int, str]:
        ordinary = {rank: token.decode("latin-1") for token, rank in self._ranks.items()}
        return ordinary | {id_: spelling for spelling, id_ in self._special.items()}

    def _encode_text(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def _decode_ids(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)
