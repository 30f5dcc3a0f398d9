"""Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError
from data_prep.manifest import TokenizerRecord
from data_prep.tokenizer import ids_array

_EOS_SPELLINGS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_BOS_SPELLINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, without its truncation, padding and post-processing."""

    def __init__(self, path: Path, eos: str | None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(f"{path}: needs the package `tokenizers`; pip install tokenizers") from error
        self.file = path
        self._eos_given = eos
        self._release = tokenizers.__version__
        try:
            content = json.loads(path.read_bytes())
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json ({' '.join(str(error).split())})") from error
        if content.get("model", {}).get("dropout"):
            raise DataError(f"{path}: model.dropout is set, so that ids would be random; remove it from the file")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # their spellings in text are text
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = self._eos(content, vocabulary, eos)
        self.bos_id = next((vocabulary[spelling] for spelling in _BOS_SPELLINGS if spelling in vocabulary), None)
        first = self._tokenizer.encode("a", add_special_tokens=False).tokens
        self.adds_prefix_space = bool(first) and first[0].startswith(("\u2581", "\u0120"))

    def _eos(self, content: dict[str, Any], vocabulary: dict[str, int], eos: str | None) -> int:
        special = [token["content"] for token in content.get("added_tokens", []) if token.get("special")]
        if eos is not None:
            if eos not in vocabulary:
                raise DataError(f"--eos {eos}: not a token of {self.file}; its special tokens: {' '.join(special)}")
            return vocabulary[eos]
        found = [spelling for spelling in _EOS_SPELLINGS if spelling in special]
        if len(found) != 1:
            raise DataError(
                f"{self.file}: which token ends a document is not clear ({' '.join(special) or 'no special tokens'}); "
                "give --eos TOKEN"
            )
        return vocabulary[found[0]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        # Without offsets into the text, which cost a sixth of the time.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [ids_array(one.ids) for one in encoded]

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def record(self) -> TokenizerRecord:
        return TokenizerRecord(
            kind="huggingface",
            file=self.file.name,
            sha256=sha256_of_file(self.file),
            backend=f"tokenizers {self._release}",
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            bos_id=self.bos_id,
            options={} if self._eos_given is None else {"eos": self._eos_given},
        )
