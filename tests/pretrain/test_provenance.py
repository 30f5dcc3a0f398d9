"""config.yaml of a run folder: readable again, and a folder that cannot be written."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from pretrain.config_file import check_config, load_config
from pretrain.errors import PretrainError, SaveError, exit_code_of
from pretrain.exit_codes import FINAL
from pretrain.provenance import git_revision, write_resolved_config
from tests.support.faults import small_disk
from tests.support.runs import small_tree


def test_resolved_config_gives_the_same_run(dataset: Path, tmp_path: Path) -> None:
    config = check_config(small_tree(tmp_path / "run", dataset), "test")
    write_resolved_config(tmp_path / "run", config, {"bf16": {"enabled": True}})
    assert load_config(tmp_path / "run/config.yaml") == config
    text = (tmp_path / "run/config.yaml").read_text()
    assert re.search(r"^# torch 2\.13", text, re.MULTILINE)
    assert re.search(r"^# git ([0-9a-f]{40}(-dirty)?|unknown)$", text, re.MULTILINE)
    assert "#   enabled: true" in text
    assert git_revision() in text


def test_run_folder_in_the_place_of_a_file(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = check_config(small_tree(tmp_path / "file/run", dataset), "test")
    with pytest.raises(PretrainError, match=r"out: .*file/run: cannot be written: Not a directory"):
        write_resolved_config(tmp_path / "file/run", config, {})


def test_full_disk_may_pass_and_is_no_mistake(dataset: Path, tmp_path: Path) -> None:
    """The supervisor starts the run again."""
    config = check_config(small_tree(tmp_path / "disk/run", dataset), "test")
    with small_disk(tmp_path / "disk", megabytes=1) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not permitted here")
        with contextlib.suppress(OSError), (tmp_path / "disk/ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(SaveError, match=r"out: .*run: cannot be written: No space left on device") as caught:
            write_resolved_config(tmp_path / "disk/run", config, {})
    assert exit_code_of(caught.value) not in FINAL
