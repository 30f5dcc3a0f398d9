"""One piece in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.filters import Filters
from data_prep.sources import whole_files
from data_prep.sources.files import find_files
from data_prep.sources.pieces import FilesPiece
from data_prep.sources.records import Reading, Rejected
from data_prep.tokenizer import Tokenizer, TokenizerSpec
from data_prep.tokenizing import encoding
from data_prep.tokenizing.worker import SplitPart, Worker, WorkerSetup

TEXT = ("größer " * 20 + "a" * 300 + " word\n") * 800


@pytest.fixture
def one_worker(tmp_path: Path, model_file: Path) -> Worker:
    spill = tmp_path / "spill"
    spill.mkdir()
    return Worker(WorkerSetup(TokenizerSpec(model_file), False, "uint16", Reading(), Filters(), 0.0, spill))


def piece_of(path: Path) -> FilesPiece:
    return FilesPiece(tuple(find_files([str(path)])))


def tokens_of(part: SplitPart) -> list[int]:
    content = part.tokens if isinstance(part.tokens, bytes) else part.tokens.read_bytes()
    ids: list[int] = np.frombuffer(content, "<u2").tolist()
    return ids


def test_a_streamed_document_gives_what_a_held_one_gives(
    tmp_path: Path, one_worker: Worker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.txt"
    path.write_text(TEXT)
    held = one_worker.tokens(piece_of(path), frozenset())
    hashes = one_worker.hashes(piece_of(path))
    monkeypatch.setattr(whole_files, "LARGE_BYTES", 100_000)
    monkeypatch.setattr(encoding, "_SPILL_BYTES", 50_000)
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 20_000)
    streamed = one_worker.tokens(piece_of(path), frozenset())
    assert isinstance(streamed.splits["train"].tokens, Path)
    assert tokens_of(streamed.splits["train"]) == tokens_of(held.splits["train"])
    assert streamed.splits["train"].text_bytes == held.splits["train"].text_bytes == len(TEXT.encode())
    assert streamed.content == held.content
    assert one_worker.hashes(piece_of(path)) == hashes
    assert tokenizer.decode(tokens_of(held.splits["train"])[:-1]) == TEXT


@pytest.mark.parametrize(
    ("damage", "reason"), [(b"\xff", "invalid_utf8"), (b"\xc3", "invalid_utf8"), (b"\0", "nul_byte")]
)
def test_a_large_document_is_checked_before_it_is_used(
    tmp_path: Path, one_worker: Worker, monkeypatch: pytest.MonkeyPatch, damage: bytes, reason: str
) -> None:
    monkeypatch.setattr(whole_files, "LARGE_BYTES", 100_000)
    path = tmp_path / "large.txt"
    path.write_bytes(TEXT.encode() + damage)
    result = one_worker.tokens(piece_of(path), frozenset())
    assert [found.reason for found in result.rejected if isinstance(found, Rejected)] == [reason]
    assert result.splits["train"].tokens == b""
