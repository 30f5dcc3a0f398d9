"""tiktoken encodings from a local rank file; nothing is downloaded."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import TokenizerRecord

# Split patterns and <|endoftext|> ids as published in tiktoken_ext/openai_public.py of tiktoken 0.14.0.
_R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


@dataclass(frozen=True)
class _Encoding:
    pattern: str
    ranks: int
    eos_id: int
    vocab_size: int


ENCODINGS = {
    "gpt2": _Encoding(_R50K, 50_256, 50_256, 50_257),
    "r50k_base": _Encoding(_R50K, 50_256, 50_256, 50_257),
    "p50k_base": _Encoding(_R50K, 50_280, 50_256, 50_281),
    "cl100k_base": _Encoding(_CL100K, 100_256, 100_257, 100_277),
    "o200k_base": _Encoding(_O200K, 199_998, 199_999, 200_019),
}


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not `base64-token rank`") from error
    if len({token for token in ranks if len(token) == 1}) != 256:
        raise DataError(f"{path}: the 256 single bytes are not all there; not a tiktoken rank file")
    return ranks


class TiktokenTokenizer:
    """A rank file under the split pattern of a named encoding.

    With the encoding's published number of ranks EOS has its published id; with another, the id after the last.
    """

    def __init__(self, path: Path, encoding: str | None) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(f"{path}: needs the package `tiktoken`; pip install tiktoken") from error
        self.file = path
        self.encoding = encoding or path.stem
        self._encoding_given = encoding
        self._release = tiktoken.__version__
        if self.encoding not in ENCODINGS:
            raise DataError(
                f"{path}: its name is no encoding known here; give --tiktoken-encoding, one of {' '.join(ENCODINGS)}"
            )
        known = ENCODINGS[self.encoding]
        ranks = _ranks(path)
        published = len(ranks) == known.ranks
        self.eos_id = known.eos_id if published else max(ranks.values()) + 1
        self.vocab_size = known.vocab_size if published else self.eos_id + 1
        self.bos_id: int | None = None
        self.adds_prefix_space = False
        self._tiktoken = tiktoken.Encoding(
            self.encoding,
            pat_str=known.pattern,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": self.eos_id},
        )

    def encode(self, text: str) -> list[int]:
        return self._tiktoken.encode_ordinary(text)

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        return [self._tiktoken.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return self._tiktoken.decode([id_ for id_ in ids if id_ != self.eos_id])

    def record(self) -> TokenizerRecord:
        return TokenizerRecord(
            kind="tiktoken",
            file=self.file.name,
            sha256=sha256_of_file(self.file),
            backend=f"tiktoken {self._release}",
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            bos_id=None,
            options={} if self._encoding_given is None else {"encoding": self._encoding_given},
        )
