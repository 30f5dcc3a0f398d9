"""Copies in host memory, files with checksums, and reading that runs no code."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

from data_prep.durable import sha256_of_file
from pretrain.checkpoint_files import HostCopies, content_bytes, read_file, write_file
from pretrain.errors import CheckpointError

INFO = CheckpointCommitInfo(tag="step", save_dir="folder", save_latest=False)


def content() -> dict[str, Any]:
    flat = torch.arange(12, dtype=torch.float32)
    tied = torch.ones(2, 3, dtype=torch.bfloat16)
    return {
        "module": OrderedDict(a=tied, b=tied, c=flat[3:9].view(2, 3)),
        "list": [flat, 1, "text", None, (torch.tensor(2.0), {"k": True})],
        "empty": torch.empty(0),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_copies_do_not_follow_the_run_and_memory_is_used_again() -> None:
    copies, source = HostCopies(), content()
    copies.create(INFO)
    copies.save(source, "folder/step/x.pt")
    taken = copies.take()
    assert same(taken["x.pt"], content())
    source["list"][0].add_(1)
    source["module"]["a"].zero_()
    assert same(taken["x.pt"], content())
    assert taken["x.pt"]["module"]["a"] is taken["x.pt"]["module"]["b"]
    copies.create(INFO)
    copies.save(source, "folder/step/x.pt")
    again = copies.take()
    assert same(again["x.pt"], source)
    assert again["x.pt"]["list"][0].data_ptr() == taken["x.pt"]["list"][0].data_ptr()
    assert copies.take() == {}


def test_files_read_back_with_the_checksum_that_was_told(tmp_path: Path) -> None:
    record = write_file(tmp_path / "x.pt", content())
    assert record.sha256 == sha256_of_file(tmp_path / "x.pt")
    assert record.bytes == (tmp_path / "x.pt").stat().st_size
    assert same(read_file(tmp_path / "x.pt"), content())
    assert same(read_file(tmp_path / "x.pt", mmap=True), content())


def test_bytes_are_foretold(tmp_path: Path) -> None:
    large = {"a": [torch.zeros(1000, 1000)], "b": torch.zeros(10, dtype=torch.bfloat16)}
    assert content_bytes(large) == 4_000_020
    assert write_file(tmp_path / "x.pt", large).bytes == pytest.approx(4_000_020, rel=1e-3)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_reading_runs_no_code(tmp_path: Path) -> None:
    torch.save({"module": Attack(f"touch {tmp_path / 'owned'}")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x.pt: cannot be read"):
        read_file(tmp_path / "x.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("damage", ["missing", "text", "cut"])
def test_unreadable_files_are_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.pt"
    if damage == "text":
        path.write_text("no archive")
    if damage == "cut":
        write_file(path, content())
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"x.pt: cannot be read: .+") as raised:
        read_file(path)
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_an_os_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), content())
