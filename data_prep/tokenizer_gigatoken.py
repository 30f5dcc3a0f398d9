"""gigatoken, a faster backend for all three kinds of tokenizer file, trusted only after it has been compared."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.manifest import TokenizerRecord
from data_prep.segments import segments
from data_prep.tokenizer import Tokenizer, TokenizerSpec, ids_array

SAMPLE_CHARS = 1 << 22  # of the user's corpus, compared before the backend is used
# gigatoken 0.10 keeps every word that it has seen, about 100 bytes each and without end; then it is loaded anew.
_CACHED_CHARS = 1 << 25


class GigatokenTokenizer:
    """Encodes with gigatoken, and with the reference tokenizer any text that holds a special token's spelling.

    gigatoken always takes such a spelling for the token.
    """

    def __init__(self, reference: Tokenizer, spec: TokenizerSpec) -> None:
        try:
            import gigatoken
        except ImportError as error:
            raise DataError("--backend gigatoken: the package is not installed; pip install gigatoken") from error
        self._reference = reference
        self._spec = spec
        self.file = reference.file
        self.vocab_size = reference.vocab_size
        self.eos_id = reference.eos_id
        self.bos_id = reference.bos_id
        self.adds_prefix_space = reference.adds_prefix_space
        self._library = gigatoken
        self._fast, self._spellings = self._loaded()
        self._encoded_chars = 0
        # Of hundreds of spellings this is quick to look for.
        self._prefix = os.path.commonprefix(self._spellings)  # noqa: RUF071 (no paths)

    def _loaded(self) -> tuple[Any, list[str]]:
        try:
            return _load(self._library, self._reference.record().kind, self._spec, self._reference)
        except Exception as error:  # a beta library may raise anything on a file that it does not support
            reason = " ".join(str(error).split())
            raise DataError(f"--backend gigatoken cannot load {self._spec.path} ({reason})") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        self._encoded_chars += sum(map(len, texts))
        if self._encoded_chars > _CACHED_CHARS:
            self._fast, self._encoded_chars = self._loaded()[0], 0
        return [
            ids_array(self._reference.encode(text))
            if not text or (self._prefix in text and any(spelling in text for spelling in self._spellings))
            else self._fast.encode(text)
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        return self._reference.decode(ids)

    def record(self) -> TokenizerRecord:
        import gigatoken

        version = getattr(gigatoken, "__version__", None) or _installed_version()
        return replace(self._reference.record(), backend=f"gigatoken {version}")

    def compare(self, texts: Iterable[str]) -> None:
        """Encodes texts of the user's corpus both ways.

        Raises:
            DataError: the ids differ.
        """
        for text in texts:
            for part in segments(text, not self.adds_prefix_space):
                if self.encode(part) != self._reference.encode(part):
                    raise DataError(
                        f"--backend gigatoken: its ids differ from the reference tokenizer's on this corpus, "
                        f"first in a text that begins {part[:40]!r}; use --backend reference"
                    )


def _installed_version() -> str:
    from importlib.metadata import version

    return version("gigatoken")


def _load(library: Any, kind: str, spec: TokenizerSpec, reference: Tokenizer) -> tuple[Any, list[str]]:
    """The fast tokenizer and the spellings that it would take for special tokens."""
    path = str(spec.path)
    if kind == "sentencepiece":
        return library.Tokenizer.from_sentencepiece(path), ["<s>", "</s>", "<unk>", "\u2581"]
    if kind == "tiktoken":
        encoding = spec.encoding or spec.path.stem
        special = {"<|endoftext|>": reference.eos_id}
        return library.Tokenizer.from_tiktoken(path, encoding.removesuffix("_base"), special), list(special)
    import json

    added = json.loads(spec.path.read_bytes()).get("added_tokens", [])
    return library.Tokenizer(path), [token["content"] for token in added]
