"""Files that are either whole or absent, also after a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name, flushes to disk and renames."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Flushes every file and folder below `temporary` to disk, then renames it to `final`."""
    for path in sorted(temporary.rglob("*"), reverse=True):
        flush(path)
    flush(temporary)
    temporary.rename(final)
    flush(final.parent)


def flush(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
