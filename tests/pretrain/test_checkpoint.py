"""Which checkpoint is chosen, and what is refused. Saving and loading run on real ranks in test_run.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deeploop_model import DeepLoopConfig, ExponentRule
from pretrain.checkpoint import STATE_FILE, RunState, check_match, choose, model_fields, newest, read_state
from pretrain.errors import CheckpointError

STATE = RunState(
    step=10,
    samples=80,
    global_batch_size=8,
    seed=0,
    world_size=2,
    zero_stage=2,
    model={"d_model": 32},
    alpha=2.0,
    data_fingerprint="a",
    tokenizer_sha256="b",
)


def test_newest_is_the_highest_finished_step(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    assert newest(tmp_path) is None
    for name in ("step_00000900", "step_00001000", "step_100000000", ".step_200000000.tmp", "other", "zero_to_fp32.py"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) == tmp_path / "step_100000000"


def test_choose(tmp_path: Path) -> None:
    (tmp_path / "step_00000010").mkdir()
    assert choose("never", tmp_path) is None
    assert choose("auto", tmp_path) == tmp_path / "step_00000010"
    assert choose(str(tmp_path), Path("unused")) == tmp_path
    with pytest.raises(CheckpointError, match=r"checkpoint.resume: latest: no such folder; use auto, never or"):
        choose("latest", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a checkpoint of this project"),
        ("{", "cannot be understood"),
        ("{}", "cannot be understood"),
        ('{"format_version": 99}', "format version 99, expected 1"),
        ('{"format_version": 1, "step": 3}', "cannot be understood"),
    ],
)
def test_state_files_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_state(tmp_path)


def test_state_reads_back(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(json.dumps(dataclasses.asdict(STATE)))
    assert read_state(tmp_path) == STATE
    check_match(tmp_path, STATE, STATE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", {"d_model": 64}, "is of another model: model.d_model is 32 there and 64 in this run"),
        ("data_fingerprint", "b", "data_fingerprint is 'a' there and 'b'"),
        ("seed", 1, "seed is 0 there and 1"),
        ("world_size", 4, "world_size is 2 there and 4 in this run: run with as many ranks"),
        ("zero_stage", 3, "zero_stage is 2 there and 3"),
    ],
)
def test_what_differs_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_match(Path("folder"), STATE, dataclasses.replace(STATE, **{field: value}))


def test_a_checkpoint_older_than_a_model_field_has_its_default() -> None:
    fields = model_fields(DeepLoopConfig())
    older = dataclasses.replace(STATE, model={k: v for k, v in fields.items() if k != "num_prelude_blocks"})
    check_match(Path("folder"), older, dataclasses.replace(STATE, model=fields))
    with pytest.raises(CheckpointError, match=r"model\.num_prelude_blocks is 0 there and 2 in this run"):
        check_match(Path("folder"), older, dataclasses.replace(STATE, model={**fields, "num_prelude_blocks": 2}))


def test_model_fields_read_back_as_the_config() -> None:
    """A checkpoint's fields, through JSON, are all that builds the same model."""
    config = DeepLoopConfig(
        num_prelude_blocks=1, num_coda_blocks=2, injection="concat-linear", round_embedding=True, position="learned",
        num_kv_heads=4, qk_norm=True, feed_forward="swiglu", d_ff=100, residual=ExponentRule(p=0.4),
    )  # fmt: skip
    fields = json.loads(json.dumps(model_fields(config)))
    assert DeepLoopConfig(**{**fields, "residual": ExponentRule(**fields["residual"])}) == config
