"""Saving on real ranks: in the background, and when the disk does not want to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pretrain import checkpoint_files, saver
from pretrain import checkpoint_store as store
from pretrain.exit_codes import Exit
from pretrain.monitor.run_log import RunLog
from tests.support.ranks import run_ranks
from tests.support.runs import optimizer_tensors, run_main, small_tree, write_tree


def slow_writes_main(config: Path, release: Path) -> int:
    """A run whose files are written only when a later step has been logged."""
    write = checkpoint_files.write_file

    def waiting_write(path: Path, content: Any) -> store.FileRecord:
        while not release.exists():
            pass
        return write(path, content)

    said = RunLog.training

    def training(self: RunLog, step: int, *values: Any) -> None:
        said(self, step, *values)
        if step == 8:
            release.touch()

    with patch.object(saver, "write_file", waiting_write), patch.object(RunLog, "training", training):
        return run_main(config)


def test_training_goes_on_while_a_checkpoint_is_written(dataset: Path, tmp_path: Path) -> None:
    """The save of step 5 is held back until step 8 is done, and still holds the state of step 5."""
    for name, background in (("background", True), ("at_once", False)):
        tree = small_tree(tmp_path / name, dataset, steps=12, validate_every=0)
        tree["checkpoint"] = {"every": 5, "background": background}
        config = write_tree(tmp_path / f"{name}.yaml", tree)
        if background:
            results = run_ranks(2, slow_writes_main, config, tmp_path / "release", folder=tmp_path)
        else:
            results = run_ranks(2, run_main, config, folder=tmp_path)
        assert [r.value for r in results] == [0, 0]
        if background:
            lines = results[0].stdout.splitlines()
            saved = next(i for i, line in enumerate(lines) if line.startswith("saved") and "00000005" in line)
            assert any(line.startswith("step  8/12") for line in lines[:saved])
            assert any(line.startswith("step 12/12") for line in lines[saved:])
    for step in (5, 10, 12):
        a, b = (
            optimizer_tensors(tmp_path / name / f"checkpoints/step_{step:08}") for name in ("background", "at_once")
        )
        assert a.keys() == b.keys()
        assert all(a[name].equal(b[name]) for name in a)


def failing_main(config: Path, failing_steps: list[int]) -> int:
    """A run in which rank 1 cannot write the checkpoints of some steps."""
    write = checkpoint_files.write_file

    def failing_write(path: Path, content: Any) -> store.FileRecord:
        if any(str(step) in path.parent.name for step in failing_steps) and "rank_1" in path.name:
            path.write_bytes(b"half of")
            return write(Path("/dev/full"), content)
        return write(path, content)

    with patch.object(saver, "write_file", failing_write):
        return run_main(config)


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


def test_a_save_that_fails_is_told_and_the_run_goes_on(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tree = small_tree(out, dataset, steps=25, validate_every=0)
    tree["checkpoint"] = {"every": 5, "keep_last": 2, "keep_every": 20}
    config = write_tree(tmp_path / "run.yaml", tree)
    results = run_ranks(2, failing_main, config, [10, 15], folder=tmp_path)
    assert [r.value for r in results] == [0, 0]
    told = [event["fault"] for event in events(out, "save_failed")]
    assert len(told) == 2
    assert all("rank 1: " in fault and "No space left on device" in fault for fault in told)
    assert [store.step_of(folder) for folder in store.finished(out / "checkpoints")] == [25, 20]
    assert all(path.name.startswith("step_") for path in (out / "checkpoints").iterdir())
    for folder in store.finished(out / "checkpoints"):
        store.check_whole(folder)


def test_the_last_save_must_succeed(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tree = small_tree(out, dataset, steps=6, validate_every=0)
    tree["checkpoint"] = {"every": 3}
    config = write_tree(tmp_path / "run.yaml", tree)
    results = run_ranks(2, failing_main, config, [6], folder=tmp_path)
    assert [r.value for r in results] == [Exit.SAVE_FAILED] * 2
    assert all("the checkpoint of step 6 could not be saved: rank 1: " in r.stderr for r in results)
    assert [store.step_of(folder) for folder in store.finished(out / "checkpoints")] == [3]
    assert json.loads((out / "status.json").read_text())["outcome"] == "save_failed"
    assert not (out / "DONE").exists()


def without_room_main(config: Path) -> int:
    with patch.object(store, "SPARE_BYTES", 10**18):
        return run_main(config)


def test_without_room_nothing_is_written(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tree = small_tree(out, dataset, steps=4, validate_every=0)
    tree["checkpoint"] = {"every": 2}
    config = write_tree(tmp_path / "run.yaml", tree)
    results = run_ranks(2, without_room_main, config, folder=tmp_path)
    assert [r.value for r in results] == [Exit.SAVE_FAILED] * 2
    assert [event["step"] for event in events(out, "save_failed")] == [2, 4]
    assert "MB are free" in events(out, "save_failed")[0]["fault"]
    assert list((out / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_made(dataset: Path, tmp_path: Path) -> None:
    """A file stands where the temporary folder should be made: as root, permissions would not stop anybody."""
    out = tmp_path / "out"
    tree = small_tree(out, dataset, steps=4, validate_every=0)
    tree["checkpoint"] = {"every": 2}
    config = write_tree(tmp_path / "run.yaml", tree)
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / ".step_00000002.tmp").write_text("in the way")
    results = run_ranks(2, run_main, config, folder=tmp_path)
    assert [r.value for r in results] == [0, 0]
    assert "cannot be made: File exists" in events(out, "save_failed")[0]["fault"]
    assert [store.step_of(folder) for folder in store.finished(out / "checkpoints")] == [4]
