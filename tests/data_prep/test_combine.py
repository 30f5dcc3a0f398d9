from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.combine import adopt, export, import_foreign, merge
from data_prep.errors import DataError
from data_prep.manifest import load_manifest
from data_prep.megatron import write_index
from data_prep.reader import open_split
from data_prep.show import document_ids
from data_prep.verify import problems
from tests.support.datasets import write_dataset

EOS = 0


def stream(folder: Path, split: str = "train") -> list[int]:
    opened = open_split(folder, split)
    tokens: list[int] = opened.windows(np.array([0]), opened.num_tokens)[0].tolist()
    return tokens


def test_merge_joins_in_order(tmp_path: Path) -> None:
    write_dataset(
        tmp_path / "a", {"train": [np.array([1, 2, EOS]), np.array([3, EOS])], "validation": [np.array([9, EOS])]}
    )
    write_dataset(tmp_path / "b", {"train": [np.array([4, EOS])]})
    (tmp_path / "b/rejected.jsonl").write_text('{"file": "x.jsonl", "line": 3, "reason": "empty"}\n')
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "both")
    report = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert report == [{"dataset": "b", "file": "x.jsonl", "line": 3, "reason": "empty"}]
    assert stream(tmp_path / "out") == [1, 2, EOS, 3, EOS, 4, EOS]
    assert stream(tmp_path / "out", "validation") == [9, EOS]
    assert merged.splits["train"].text_bytes == 7
    assert list(problems(tmp_path / "out")) == []
    with pytest.raises(DataError, match="holds a dataset already"):
        merge([tmp_path / "a"], tmp_path / "out", "both")


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", {"train": [np.array([1, EOS])]})
    write_dataset(tmp_path / "b", {"train": [np.array([1, EOS])]}, vocab_size=100)
    with pytest.raises(DataError, match=r"vocab_size is 100, but .* has 65000"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "both")


@pytest.mark.parametrize("kind", ["nanogpt", "llmc"])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_there_and_back(tmp_path: Path, kind: str, dtype: str) -> None:
    tokens = [np.array([1, 2, EOS, 3]), np.array([4, EOS, 60_000])]
    vocab = 65_000 if dtype == "uint16" else 65_536
    write_dataset(tmp_path / "a", {"train": tokens, "validation": [np.array([7, 8])]}, dtype=dtype, vocab_size=vocab)
    written = export(tmp_path / "a", kind, tmp_path / "foreign")
    assert [path.name for path in written] == ["train.bin", "val.bin"]
    if kind == "nanogpt":
        assert np.fromfile(written[0], np.uint16).tolist() == [1, 2, EOS, 3, 4, EOS, 60_000]
    else:
        header = np.fromfile(written[0], np.int32, 256)
        assert header[:3].tolist() == ([20240520, 1, 7] if dtype == "uint16" else [20240801, 7, 7])
        wide = np.uint16 if dtype == "uint16" else np.uint32
        assert np.fromfile(written[0], wide, offset=1024).tolist() == [1, 2, EOS, 3, 4, EOS, 60_000]
    files = {"train": [written[0]], "validation": [written[1]]}
    made = import_foreign(files, kind, tmp_path / "back", "back", vocab, EOS)
    assert stream(tmp_path / "back") == stream(tmp_path / "a")
    assert made.splits["train"].documents == 3
    assert list(problems(tmp_path / "back")) == []


def test_foreign_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"\1\2\3")
    for kind, match in [
        ("nanogpt", "3 bytes; expected a non-empty file of uint16"),
        ("llmc", "expected llm.c's magic"),
    ]:
        with pytest.raises(DataError, match=match):
            import_foreign({"train": [path]}, kind, tmp_path / kind, "x", 100, EOS)
    path.write_bytes(np.array([5, 200], dtype=np.uint16).tobytes())
    with pytest.raises(DataError, match="holds token 200; --vocab-size is 100"):
        import_foreign({"train": [path]}, "nanogpt", tmp_path / "n", "x", 100, EOS)
    write_dataset(tmp_path / "wide", {"train": [np.array([1])]}, dtype="int32", vocab_size=65_537)
    with pytest.raises(DataError, match="nanoGPT's files hold uint16"):
        export(tmp_path / "wide", "nanogpt", tmp_path / "out")


def test_adopting_leaves_the_pairs_as_they_are(tmp_path: Path, model_file: Path) -> None:
    (tmp_path / "deep").mkdir()
    tokens = np.array([1, 2, EOS, 3, 4], dtype=np.uint16)
    (tmp_path / "deep/text_document.bin").write_bytes(tokens.tobytes())
    with (tmp_path / "deep/text_document.idx").open("wb") as file:
        write_index(file, "uint16", np.array([3, 2], dtype=np.int32))
    before = (tmp_path / "deep/text_document.idx").read_bytes()
    with pytest.raises(DataError, match="give --tokenizer FILE, or --vocab-size"):
        adopt({"train": ["deep/text_document"]}, tmp_path, "x", None, None, None)
    adopt({"train": ["deep/text_document"]}, tmp_path, "x", None, None, model_file)
    assert stream(tmp_path) == tokens.tolist()
    assert (tmp_path / "deep/text_document.idx").read_bytes() == before
    assert load_manifest(tmp_path).tokenizer.vocab_size == 440
    assert list(problems(tmp_path)) == []
    assert [ids for _, ids in document_ids(tmp_path, "train", 0, 5)] == [[1, 2, EOS], [3, 4]]
    with pytest.raises(DataError, match=r"has a manifest\.json already"):
        adopt({"train": ["deep/text_document"]}, tmp_path, "x", 10, None, None)


def test_verify_finds_every_kind_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damaged(name: str, vocab_size: int = 100) -> Path:
        folder = tmp_path / name
        write_dataset(
            folder, {"train": [np.array([1, 2, EOS, 50, EOS])]}, document_lengths=[3, 2], vocab_size=vocab_size
        )
        return folder

    assert main(["verify", str(damaged("good"))]) == 0
    assert "agrees with the manifest" in capsys.readouterr().out

    def flip(path: Path, position: int) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(bytes(content))

    cases: dict[str, tuple[Callable[[Path], object], str]] = {
        "tokens": (lambda folder: flip(folder / "corpus-train-00000.bin", 0), "bin_sha256 is"),
        "index": (lambda folder: flip(folder / "corpus-train-00000.idx", 45), "pointers do not follow"),
        "cut": (lambda folder: (folder / "corpus-train-00000.bin").write_bytes(b"ab"), "2 bytes, but"),
        "gone": (lambda folder: (folder / "corpus-train-00000.idx").unlink(), "cannot be read"),
        "end": (lambda folder: flip(folder / "corpus-train-00000.bin", 4), "does not end with the EOS"),
    }
    for name, (damage, expected) in cases.items():
        folder = damaged(name)
        damage(folder)
        assert main(["verify", str(folder)]) == 2, name
        out = capsys.readouterr()
        assert expected in out.out, name
        assert out.err.startswith("error: ")
    folder = damaged("range", vocab_size=50)
    assert main(["verify", str(folder)]) == 2
    assert "token 50 at offset 3, outside the vocabulary of 50" in capsys.readouterr().out


def test_inspect_shows_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path, {"train": [np.array([1, 2, EOS, 50, EOS])]}, document_lengths=[3, 2])
    assert main(["inspect", str(tmp_path), "--document", "1"]) == 0
    assert "--- train document 1: 2 tokens" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--document", "2"]) == 2
    assert "no document 2; there are 2" in capsys.readouterr().err
