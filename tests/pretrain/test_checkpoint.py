"""Which checkpoint is chosen, and what is refused. Saving and loading run on real ranks in test_run.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deeploop_model import DeepLoopConfig, ExponentRule
from pretrain import checkpoint_store as store
from pretrain.checkpoint import STATE_FILE, RunState, check_match, choose, model_fields, read_state
from pretrain.errors import CheckpointError
from pretrain.ranks import Ranks, patient_group, process_group
from tests.support.ranks import run_ranks

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


def published(root: Path, step: int) -> Path:
    """A checkpoint of one rank's making, with a state and a data file."""
    temporary = store.temporary_folder(root, step)
    temporary.mkdir(parents=True)
    text = json.dumps(dataclasses.asdict(dataclasses.replace(STATE, step=step)))
    files = {name: store.write_text(temporary / name, text) for name in (STATE_FILE, "weights.pt")}
    store.publish(temporary, store.step_folder(root, step), files)
    return store.step_folder(root, step)


def choices(cases: list[tuple[str, Path]]) -> list[str]:
    """The folder that each case's `choose` comes to, or its error."""
    ranks = Ranks.from_environment()
    found = []
    with process_group(ranks):
        group = patient_group(60)
        for resume, root in cases:
            try:
                found.append(str(choose(resume, root, ranks, group)))
            except CheckpointError as error:
                found.append(f"error: {error}")
    return found


def test_choose_takes_the_newest_whole_one_and_never_silently_starts_again(tmp_path: Path) -> None:
    good, mixed, bad, empty = (tmp_path / name for name in ("good", "mixed", "bad", "empty"))
    for root in (good, mixed, bad):
        for step in (10, 20, 30):
            published(root, step)
    (good / ".step_00000040.tmp").mkdir()
    (good / "step_old").mkdir()
    flipped = mixed / "step_00000030/weights.pt"
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    (mixed / "step_00000020/manifest.json").unlink()
    for step in (10, 20, 30):
        (bad / f"step_{step:08}/weights.pt").unlink()
    cases = [
        ("auto", good),
        ("auto", mixed),
        ("auto", bad),
        ("auto", empty),
        ("never", bad),
        (str(mixed / "step_00000010"), empty),
        (str(mixed / "step_00000030"), empty),
        ("latest", good),
    ]
    results = run_ranks(2, choices, cases, folder=tmp_path)
    assert results[0].value == results[1].value
    found = results[0].value
    assert found[0] == str(good / "step_00000030")
    assert found[1] == str(mixed / "step_00000010")
    assert found[2].startswith(f"error: {bad}: none of 3 checkpoints is whole; use --resume never")
    assert found[3:5] == ["None", "None"]
    assert found[5] == str(mixed / "step_00000010")
    assert found[6].startswith(f"error: checkpoint.resume: {flipped}: is damaged: its SHA-256 differs")
    assert found[7].startswith("error: checkpoint.resume: latest: no such folder; use auto, never or")
    told = [line for line in results[0].stderr.splitlines() if line.startswith("passing by")]
    assert [str(mixed) in line for line in told] == [True, True, False, False, False]
    assert f"{flipped}: is damaged" in told[0]
    assert "manifest.json cannot be read" in told[1]


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
        ("model", {"d_model": 64}, "model.d_model is 32 there and 64 in this run"),
        ("data_fingerprint", "b", "data_fingerprint is 'a' there and 'b'"),
        ("seed", 1, "seed is 0 there and 1"),
        ("zero_stage", 3, "zero_stage is 2 there and 3"),
    ],
)
def test_what_differs_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_match(Path("folder"), STATE, dataclasses.replace(STATE, **{field: value}))


def test_all_that_differs_is_named_and_what_is_allowed_passes() -> None:
    other = dataclasses.replace(STATE, seed=1, data_fingerprint="b", world_size=4)
    with pytest.raises(CheckpointError, match=r"data_fingerprint is 'a'.*seed is 0.*checkpoint.allow_differences"):
        check_match(Path("folder"), STATE, other)
    with pytest.raises(CheckpointError, match=r"^folder: seed is 0 there and 1"):
        check_match(Path("folder"), STATE, other, allowed=["data_fingerprint"])
    check_match(Path("folder"), STATE, other, allowed=["data_fingerprint", "seed"])


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
