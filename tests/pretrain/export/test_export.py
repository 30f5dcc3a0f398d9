"""The export command's other form, its mistakes, and the way back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from deeploop_model import DeepLoopModel
from pretrain import generate
from pretrain.evaluate import main as evaluate
from pretrain.export import hf_folder, safetensors_file
from pretrain.export.__main__ import main
from pretrain.weights import find_checkpoint, load_initial_weights, load_model, read_saved
from tests.pretrain.export.conftest import Exports
from tests.support.exports import exported
from tests.support.ranks import run_ranks
from tests.support.runs import run_main, small_tree, write_tree


@pytest.mark.parametrize("name", ["text", "zero1", "zero3"])
@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_exports_read_back_are_the_checkpoint(name: str, to: str, exports: Exports, tmp_path: Path) -> None:
    own = load_model(find_checkpoint(exports.runs[name]))
    path = exports.folders[name] if to == "hf" else tmp_path / "model.safetensors"
    if to == "safetensors":
        exported(path, exports.runs[name], to=to)
        assert load_file(path).keys() == own.state_dict().keys()
    assert find_checkpoint(path) == path
    again = load_model(path)
    assert again.config == own.config
    for key, weight in own.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight), key


def test_bf16_is_the_masters_rounded(exports: Exports, tmp_path: Path) -> None:
    file = exported(tmp_path / "half.safetensors", exports.runs["text"], "--dtype", "bfloat16", to="safetensors")
    own = load_model(find_checkpoint(exports.runs["text"])).state_dict()
    for key, weight in load_file(file).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, own[key].bfloat16())


def test_generation_and_evaluation_take_exports(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(exports.data["text"])
    texts, figures = [], []
    for path in (exports.runs["text"], exports.folders["text"]):
        options = ["--prompt", "def ", "--temperature", "0", "--max-tokens", "8", "--data", data]
        assert generate.main(["--checkpoint", str(path), *options]) == 0
        texts.append(capsys.readouterr().out)
        out = tmp_path / "figures.json"
        arguments = ["--checkpoint", str(path), "--data", data, "--rounds", "1,4", "--out", str(out)]
        (result,) = run_ranks(1, evaluate, arguments, folder=tmp_path)
        assert result.value == 0
        figures.append(json.loads(out.read_text()))
    assert texts[0] == texts[1]
    assert figures[0] == figures[1]
    assert generate.main(["--checkpoint", str(exports.folders["text"]), "--prompt", "x"]) == 2
    assert "an export does not say where its dataset lies; give --data FOLDER" in capsys.readouterr().err


def test_a_run_starts_from_an_export(exports: Exports, tmp_path: Path) -> None:
    path, data = exports.folders["text"], exports.data["text"]
    tree = small_tree(tmp_path / "out", data, steps=3, validate_every=0, initial_weights=str(path), frozen=["*.0.*"])
    tree["model"] |= {"context_length": 48, "num_prelude_blocks": 1, "num_kv_heads": 1, "injection": "concat-linear"}
    (result,) = run_ranks(1, run_main, write_tree(tmp_path / "run.yaml", tree), folder=tmp_path)
    assert result.value == 0
    assert f"initial weights from {path}\n" in result.stdout
    start, after = load_model(path).state_dict(), load_model(find_checkpoint(tmp_path / "out")).state_dict()
    assert torch.equal(
        after["blocks.0.attention.qkv.weight"], start["blocks.0.attention.qkv.weight"].bfloat16().float()
    )
    assert not torch.equal(after["blocks.1.attention.qkv.weight"], start["blocks.1.attention.qkv.weight"])
    saved = read_saved(path)
    with pytest.raises(Exception, match="was trained with another tokenizer"):
        load_initial_weights(DeepLoopModel(load_model(path).config), path, "0" * 64)
    assert saved.tokenizer_sha256 == read_saved(find_checkpoint(exports.runs["text"])).tokenizer_sha256


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("hf", ["--checkpoint", "nowhere"], "nowhere: no such folder; give a run folder or a checkpoint"),
        ("hf", ["--data", "nowhere"], "nowhere: no manifest.json"),
        ("hf", ["--rounds", "0"], "--rounds: 0 must be 1 or more"),
        ("hf", ["--no-tokenizer", "--data", "x"], "--no-tokenizer: contradicts --data"),
        ("hf", ["EXISTS"], "exists; give another name, or remove it first"),
        ("hf", ["PARENT"], "no such folder as .*absent; make it first"),
        ("safetensors", [], "the name of a safetensors file must end in .safetensors"),
        ("safetensors", ["FILE", "--rounds", "3"], "--rounds: has no effect with --to safetensors"),
    ],
)
def test_mistakes_are_one_line(
    to: str, options: list[str], message: str, exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"EXISTS": tmp_path, "PARENT": tmp_path / "absent/x", "FILE": tmp_path / "x.safetensors"}
    out = next((places[option] for option in options if option in places), tmp_path / "out")
    rest = [option for option in options if option not in places]
    assert main(["--checkpoint", str(exports.runs["text"]), "--to", to, str(out), *rest]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(f"^error: .*{message}", captured.err.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_another_datasets_tokenizer_is_refused(
    exports: Exports, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[Any] = ["--checkpoint", str(exports.runs["text"]), "--to", "hf", str(tmp_path / "x")]
    assert main([*arguments, "--data", str(dataset)]) == 2
    assert "its tokenizer is not that of the run" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "module"), [("hf", hf_folder), ("safetensors", safetensors_file)])
def test_a_full_disk_leaves_nothing_behind(
    to: str, module: Any, exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        os.truncate(path, 100)
        raise OSError(28, "No space left on device")

    out = tmp_path / "out.safetensors"
    with patch.object(module, "save_file", full):
        assert main(["--checkpoint", str(exports.runs["text"]), "--to", to, str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {out}: cannot be written: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_and_damaged_ones_are_one_line(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    good = exported(tmp_path / "good.safetensors", exports.runs["text"], to="safetensors")
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-10])
    capsys.readouterr()
    for name, message in {
        "gpt2": "gpt2/config.json: is no export of this project",
        "other.safetensors": "other.safetensors: is no export of this project",
        "cut.safetensors": "cut.safetensors: cannot be read: ",
        "absent.safetensors": "absent.safetensors: cannot be read: ",
    }.items():
        data = str(exports.data["text"])
        assert generate.main(["--checkpoint", str(tmp_path / name), "--prompt", "x", "--data", data]) == 2
        assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err.splitlines(keepends=True)[-1])
