"""The description of a configuration, and the command that prints it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.describe import describe, main, render
from deeploop_model.init import swiglu_gain

SMALL: dict[str, Any] = {
    "num_blocks": 2, "num_rounds": 3, "num_prelude_blocks": 1, "num_coda_blocks": 1, "d_model": 32, "num_heads": 4,
    "num_kv_heads": 2, "vocab_size": 50, "context_length": 16, "injection": "concat-linear", "feed_forward": "swiglu",
}  # fmt: skip


def test_parameters_stored_and_unrolled() -> None:
    """The unrolled count is that of a real stack in which nothing is shared."""
    config = DeepLoopConfig(**SMALL)
    described = describe(config)
    model = DeepLoopModel(config)
    assert described.stored_parameters == sum(w.numel() for w in model.parameters())
    block = sum(w.numel() for w in model.blocks[0].parameters())
    adapter = 2 * 32 * 32 + 32
    assert described.unrolled_parameters == (1 + 2 * 3 + 1) * block + 3 * adapter + 64 * 32 + 32


def test_matrices_are_counted_with_their_spread() -> None:
    described = describe(DeepLoopConfig(**SMALL))
    rows = {matrix.name: matrix for matrix in described.matrices}
    beta, up = (8 * 8) ** -0.5, swiglu_gain(described.config)
    assert rows["blocks.*.attention.value"].shape == (16, 32)
    assert rows["blocks.*.attention.value"].count == 2
    assert rows["blocks.*.attention.value"].std == pytest.approx(beta * (2 / 48) ** 0.5)
    assert rows["blocks.*.attention.key"].std == pytest.approx((2 / 48) ** 0.5)
    assert rows["prelude.*.feed_forward.gate"].std == pytest.approx((2 / (32 + 128)) ** 0.5)
    assert rows["coda.*.feed_forward.up"].std == pytest.approx(up * beta * (2 / (32 + 128)) ** 0.5)
    assert rows["injection.linear"].std == pytest.approx((2 / 96) ** 0.5)


def test_a_hundred_billion_parameters_take_seconds() -> None:
    """Processor time, which other work on the machine does not change."""
    start = time.process_time()
    described = describe(DeepLoopConfig(num_blocks=80, num_rounds=4, d_model=10240, num_heads=80, context_length=4096))
    assert time.process_time() - start < 10
    assert 100e9 < described.stored_parameters < 102e9
    assert "parameters stored 101," in render(described) or "parameters stored 100," in render(described)


def test_command_reads_a_run_file_with_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "out: runs/x\nmodel: {num_blocks: 2, num_rounds: 8, d_model: 32, num_heads: 2, norm_eps: 1e-6}\ntrain: {}\n"
    )
    assert main(["--config", str(file), "num_kv_heads=1", "model.residual={p: 0.25}"]) == 0
    text = capsys.readouterr().out
    assert "K = 2 blocks, R = 8 rounds, prelude 0, coda 0: N = 16, M = 32 visits" in text
    assert "2 heads of 16, 1 key-value heads" in text
    assert "alpha 2.37841, beta 0.297302" in text  # 32^(1/4), 128^(-1/4)
    assert f"KV cache per token, bf16: {16 * 2 * 16 * 2 / 1024:.4g} KiB" in text


def test_command_takes_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "looped-transformer", "num_rounds=6", "vocab_size=1000"]) == 0
    assert "K = 1 blocks, R = 6 rounds, prelude 0, coda 0: N = 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gpt3"], "preset: 'gpt3' is unknown; use one of small-loop"),
        (["--preset", "gpt2-small", "width=3"], "width: unknown key; known here: preset, num_blocks"),
        (["--preset", "gpt2-small", "num_rounds"], "override 'num_rounds': must look like key=value"),
        (["--preset", "gpt2-small", "num_rounds=many"], "num_rounds: 'many': Input should be a valid integer"),
        (["--preset", "gpt2-small", "num_rounds=[1"], "override 'num_rounds=[1': is not YAML"),
        (["--preset", "gpt2-small", "num_heads=5"], "num_heads: 5 does not cut d_model 768"),
        (["--preset", "gpt2-small", "residual={p: -1}"], "residual.p: -1.0 must be 0 or more"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory"),
    ],
)
def test_faults_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_file_without_a_model_section_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: 3\n")
    assert main(["--config", str(file)]) == 2
    assert "must hold a section `model` of keys" in capsys.readouterr().err
