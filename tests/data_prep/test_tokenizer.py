from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.sources.stdlib import stdlib_files, stdlib_root
from data_prep.tokenizer import Tokenizer, load_tokenizer

SPECIAL_SPELLINGS = ["</s>", "<s>", "<unk>", "<0x0A>", "<|endoftext|>"]
TRICKY_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "\t\ttabs\tand\n\n\nnewlines\r\n",
    "\0 NUL \0",
    "\u2581 the meta space \u2581\u2581",
    "1234567890",
    "e\u0301 \u00e9 \ufb01 \u2126",  # what NFKC would change
    "\u2047 \U0001f600 \U0010ffff \ufeff \u200b",
    *SPECIAL_SPELLINGS,
]


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_tricky_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text() | st.text(alphabet="\u2581 \t\n\0<s/>a1"))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of ours
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)


def test_the_embedded_corpus_comes_back_exactly(tokenizer: Tokenizer) -> None:
    """Every tenth source file of the running Python, whatever it holds."""
    root = stdlib_root()
    texts = [path.read_bytes().decode(errors="ignore") for path in stdlib_files(root)[::10]]
    assert sum(map(len, texts)) > 500_000
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_indentation_and_blank_lines_are_single_pieces(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("    ")) == 1
    assert len(tokenizer.encode("\t\t")) == 1
    assert len(tokenizer.encode("\n\n")) == 1


def test_digits_are_split(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("123")) == 3


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "absent.model")
    bad = tmp_path / "bad.model"
    bad.write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"bad\.model"):
        load_tokenizer(bad)
    other = tmp_path / "a.zip"
    other.write_bytes(b"")
    with pytest.raises(DataError, match="unknown kind"):
        load_tokenizer(other)
