"""A small SentencePiece model, trained once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.training import train_sentencepiece
from tests.support.mixtures import write_sources
from tests.support.texts import SAMPLE_TEXTS


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece(SAMPLE_TEXTS, 440, "bpe"))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_tokenizer(model_file)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_sources(tmp_path_factory.mktemp("sources"))
