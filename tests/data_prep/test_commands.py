from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.reader import open_split
from data_prep.sources import stdlib
from data_prep.tokenizer import load_tokenizer


@pytest.fixture
def small_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree like the standard library's, small enough for a test."""
    root = tmp_path / "lib"
    files = {
        "abc.py": b"def first():\n    return 1\n" * 30,
        "json/__init__.py": "# größer\nimport json\n".encode() * 30,
        "json/tests/test_json.py": b"left_out = 1\n",
        "site-packages/other.py": b"left_out = 2\n",
        "latin.py": b"# caf\xe9\n",
        "empty.py": b"",
        "notes.txt": b"left out",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(stdlib, "stdlib_root", lambda: root)
    return root


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def train(out: Path, vocab_size: int = 300) -> int:
    return run("train-tokenizer", "--source", "python-stdlib", "--vocab-size", vocab_size, "--out", out)


def tokenize(out: Path, fraction: float = 0.05) -> int:
    model = out / "tokenizer.model"
    return run(
        "tokenize",
        "--source",
        "python-stdlib",
        "--tokenizer",
        model,
        "--out",
        out,
        "--validation-fraction",
        fraction,
    )


def test_from_text_to_tokens_and_back(small_stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    assert train(out / "tokenizer.model") == 0
    assert tokenize(out, 0) == 0
    split = open_split(out, "train")
    ids = split.windows(np.array([0]), split.num_tokens)[0].tolist()
    tokenizer = load_tokenizer(out)
    documents = [small_stdlib / "abc.py", small_stdlib / "json/__init__.py"]
    expected: list[int] = []
    for path in documents:
        expected += [*tokenizer.encode(path.read_text()), tokenizer.eos_id]
    assert ids == expected
    manifest = split.manifest
    assert manifest.rejected == {"invalid_utf8": 1, "empty": 1}
    assert manifest.splits["train"].text_bytes == sum(path.stat().st_size for path in documents)
    capsys.readouterr()

    assert train(out / "tokenizer.model") == 0
    assert "already trained" in capsys.readouterr().out
    assert tokenize(out, 0) == 0
    assert "already finished" in capsys.readouterr().out
    assert tokenize(out, 0.5) == 2
    assert "validation_fraction = 0.0, now 0.5" in capsys.readouterr().err
    assert train(out / "tokenizer.model", 310) == 2
    assert "vocab_size = 300, now 310" in capsys.readouterr().err


def test_an_empty_corpus_is_one_line(
    small_stdlib: Path, tmp_path: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in small_stdlib.rglob("*.py"):
        path.unlink()
    assert train(tmp_path / "data/tokenizer.model") == 2
    out = tmp_path / "data"
    assert run("tokenize", "--source", "python-stdlib", "--tokenizer", model_file, "--out", out) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert not (out / "manifest.json").exists()
