"""Checkpoint folders on disk: whole and verifiable, or not there.

`checkpoints/step_00000100/` holds files and `manifest.json`, which records the size and SHA-256 of each and of itself.
A folder is filled under a temporary name; the manifest is written last; then the folder takes its name by a rename.
What a crash leaves behind therefore has a temporary name, and what a disk damages no longer agrees with its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.durable import fsync_folder, sha256_of_file, write_atomic
from pretrain.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
STEP_FOLDER = re.compile(r"step_(\d{8,})")
TEMPORARY = re.compile(r"\.(step_\d{8,}\.tmp|dropped\.step_\d{8,})")
SPARE_BYTES = 64 << 20
"""Left free beside a checkpoint, for logs and what other programs write meanwhile."""


@dataclass(frozen=True)
class FileRecord:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def temporary_folder(root: Path, step: int) -> Path:
    return root / f".{step_folder(root, step).name}.tmp"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step_"))


def finished(root: Path) -> list[Path]:
    """Published checkpoints, newest first; whether their bytes still are what was written is not looked at."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def publish(temporary: Path, final: Path, files: Mapping[str, FileRecord]) -> None:
    """Gives a folder whose `files` are on disk its manifest and its name. Raises OSError."""
    body = {"format_version": MANIFEST_VERSION, "files": {name: asdict(files[name]) for name in sorted(files)}}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n"
    write_atomic(temporary / MANIFEST_FILE, text.encode())
    if final.exists():  # the same step, trained again after its checkpoint was found damaged
        _drop(final)
    temporary.rename(final)
    fsync_folder(final.parent)


def write_text(path: Path, text: str) -> FileRecord:
    """Writes and flushes a small file. Raises OSError."""
    content = text.encode()
    write_atomic(path, content)
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Files of a checkpoint by name. Raises CheckpointError where the manifest is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        tree: dict[str, Any] = json.loads(path.read_bytes())
        stated = tree.pop("sha256")
        if stated != _digest(tree):
            raise CheckpointError(f"{path}: is damaged: its own checksum differs")
        if tree["format_version"] != MANIFEST_VERSION:
            raise CheckpointError(f"{path}: format version {tree['format_version']}, expected {MANIFEST_VERSION}")
        return {name: FileRecord(**record) for name, record in tree["files"].items()}
    except OSError as error:
        raise CheckpointError(f"{folder}: {MANIFEST_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None


def check_files(folder: Path, records: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Raises CheckpointError that names the first of the files that is missing or differs from its record."""
    for name in names:
        path, record = folder / name, records[name]
        try:
            size = path.stat().st_size
            if size != record.bytes:
                raise CheckpointError(f"{path}: is damaged: {size} bytes, {record.bytes} were written")
            if sha256_of_file(path) != record.sha256:
                raise CheckpointError(f"{path}: is damaged: its SHA-256 differs from the one in {MANIFEST_FILE}")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def check_whole(folder: Path) -> None:
    """Reads all of a checkpoint and compares it with its manifest. Raises CheckpointError."""
    records = read_manifest(folder)
    check_files(folder, records, sorted(records))


def remove_leftovers(root: Path) -> None:
    """Deletes what a killed save or a killed deletion left."""
    for path in root.iterdir() if root.is_dir() else ():
        if TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def retain(root: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Deletes all but the newest `keep_last` checkpoints and those of a multiple of `keep_every` steps (0: none).

    Returns what was deleted.
    """
    old = [folder for folder in finished(root)[keep_last:] if keep_every == 0 or step_of(folder) % keep_every]
    for folder in old:
        with contextlib.suppress(OSError):  # one that cannot be deleted must not end the run
            _drop(folder)
    return old


def drop_after(root: Path, step: int) -> list[Path]:
    """Deletes checkpoints of later steps than `step`: those of a branch that the run has left. Returns them."""
    later = [folder for folder in finished(root) if step_of(folder) > step]
    for folder in later:
        _drop(folder)
    return later


def require_space(root: Path, needed: int) -> None:
    """Raises CheckpointError where `needed` bytes and some to spare are not free."""
    free = shutil.disk_usage(root).free
    if free < needed + SPARE_BYTES:
        raise CheckpointError(
            f"{root}: {free / 1e6:,.0f} MB are free, the checkpoint takes {needed / 1e6:,.0f} MB "
            f"and {SPARE_BYTES / 1e6:,.0f} MB must stay free"
        )


def _drop(folder: Path) -> None:
    """First by a rename: a deletion that is cut short must not leave half a checkpoint under its name."""
    hidden = folder.with_name(f".dropped.{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    fsync_folder(folder.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
