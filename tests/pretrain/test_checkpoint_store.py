"""Folders that are whole, or found not to be; which ones are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain import checkpoint_store as store
from pretrain.errors import CheckpointError


def published(root: Path, step: int, content: str = "content") -> Path:
    temporary = store.temporary_folder(root, step)
    temporary.mkdir(parents=True)
    records = {name: store.write_text(temporary / name, content + name) for name in ("a.pt", "b.pt")}
    store.publish(temporary, store.step_folder(root, step), records)
    return store.step_folder(root, step)


def steps(root: Path) -> list[int]:
    return [store.step_of(folder) for folder in store.finished(root)]


def test_a_published_folder_is_whole(tmp_path: Path) -> None:
    folder = published(tmp_path, 10)
    store.check_whole(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.pt", "b.pt", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["a.pt", "b.pt", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_a_bit, cut, empty, Path.unlink])
def test_every_damage_to_every_file_is_found_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = published(tmp_path, 10)
    damage(folder / name)
    if (name, damage) == ("manifest.json", cut):  # its last byte is a line end
        store.check_whole(folder)
        return
    with pytest.raises(CheckpointError, match=name):
        store.check_whole(folder)


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = published(tmp_path, 10) / store.MANIFEST_FILE
    whole = path.read_bytes()
    records = store.read_manifest(path.parent)
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            assert store.read_manifest(path.parent) == records, f"byte {position} changed unnoticed"
        except CheckpointError:
            continue


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path, 10)
    body = {"format_version": 2, "files": {}}
    (folder / store.MANIFEST_FILE).write_text(json.dumps({**body, "sha256": store._digest(body)}))
    with pytest.raises(CheckpointError, match="format version 2, expected 1"):
        store.read_manifest(folder)


def test_finished_are_whole_names_only_newest_first(tmp_path: Path) -> None:
    assert store.finished(tmp_path / "none") == []
    for name in ("step_00000900", "step_00001000", "step_100000000", ".step_200000000.tmp", "step_7", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00002000").write_text("a file")
    assert steps(tmp_path) == [100000000, 1000, 900]


def test_the_same_step_again_replaces_the_old_folder(tmp_path: Path) -> None:
    published(tmp_path, 10)
    folder = published(tmp_path, 10, "newer")
    store.check_whole(folder)
    assert (folder / "a.pt").read_text() == "newera.pt"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_retention_keeps_the_newest_and_every_mth(tmp_path: Path) -> None:
    for step in range(10, 110, 10):
        published(tmp_path, step)
    deleted = store.retain(tmp_path, keep_last=2, keep_every=40)
    assert steps(tmp_path) == [100, 90, 80, 40]
    assert sorted(map(store.step_of, deleted)) == [10, 20, 30, 50, 60, 70]
    store.retain(tmp_path, keep_last=1, keep_every=0)
    assert steps(tmp_path) == [100]
    assert len(list(tmp_path.iterdir())) == 1


def test_drop_after_leaves_no_later_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        published(tmp_path, step)
    store.drop_after(tmp_path, 10)
    assert steps(tmp_path) == [10]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    published(tmp_path, 10)
    for name in (".step_00000020.tmp", ".dropped.step_00000005", ".snapshot", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    store.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".snapshot", "notes", "step_00000010"]
    store.remove_leftovers(tmp_path / "none")


def test_space_is_looked_for(tmp_path: Path) -> None:
    store.require_space(tmp_path, 1000)
    with pytest.raises(CheckpointError, match=r"MB are free, the checkpoint takes 1,000,000,000,000 MB"):
        store.require_space(tmp_path, 10**18)
