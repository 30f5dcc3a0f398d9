"""Files that are either complete on disk or absent."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp", re.DOTALL)


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder and what is missing above it, so that they survive a power cut; it may exist already."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of `atomic_file` that a killed process left in `folder`."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary neighbour of `path` that takes its name once the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Writes the whole of `path` at once or not at all."""
    with atomic_file(path) as file:
        file.write(content)


def publish_folder(temporary: Path, final: Path) -> None:
    """Flushes every file and folder below `temporary` to disk, then renames it to `final`."""
    for path in temporary.rglob("*"):
        if path.is_dir():
            fsync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(temporary)
    temporary.rename(final)
    fsync_folder(final.parent)


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes as lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
