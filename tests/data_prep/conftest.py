"""A small SentencePiece model, trained once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.training import train_sentencepiece

SAMPLE_TEXTS = [
    "def area(width, height):\n\treturn width * height\n\n\nimport os\n\n\nimport re\n\n\nx = 1\n",
    "for index in range(10):\n    if index % 2:\n        print('odd', index)\n",
    "Größe, naïve café, 数据 и данные: 1234567890\n",
    "the quick brown fox jumps over the lazy dog; the dog sleeps on\n",
] * 40


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece(SAMPLE_TEXTS, 440, "bpe"))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_tokenizer(model_file)
