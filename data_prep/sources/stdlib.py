"""The embedded corpus `python-stdlib`: the sources of the running Python's standard library, about 11 MB."""

from __future__ import annotations

import sysconfig
from pathlib import Path

NAME = "python-stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_root() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(root: Path) -> list[Path]:
    """The `.py` files below `root` without tests and installed packages, in order of their relative paths."""
    files = (path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
