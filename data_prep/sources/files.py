"""Finding input files and naming what they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DataError

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class InputFile:
    """One input; `name` is its path below the argument that found it, the same on every machine."""

    path: Path
    name: str
    size: int  # bytes on disk; rows for kind "table"
    kind: str  # a value of KINDS, or "table" for a Hugging Face dataset
    compression: str  # "", "gz" or "zst"


def kind_of(path: Path) -> tuple[str, str] | None:
    """Kind and compression by suffix, e.g. `a.jsonl.gz` -> ("jsonl", "gz"); None when unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = ""
    if suffixes and suffixes[-1] in COMPRESSIONS:
        compression = COMPRESSIONS[suffixes.pop()]
    if not suffixes or suffixes[-1] not in KINDS:
        return None
    return KINDS[suffixes[-1]], compression


def input_file(path: Path, name: str) -> InputFile:
    """Describes one existing file.

    Raises:
        DataError: it cannot be read or its suffix is unknown.
    """
    found = kind_of(path)
    if found is None:
        raise DataError(f"{path}: unknown suffix; expected one of {' '.join(KINDS)}, each also with .gz or .zst")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return InputFile(path, name, size, *found)


def find_files(arguments: Sequence[str]) -> list[InputFile]:
    """Expands files, folders (recursively, known suffixes only) and globs, in an order that is the same everywhere.

    Raises:
        DataError: an argument matches nothing, or a named file is of an unknown kind.
    """
    files: list[InputFile] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            below = (child for child in path.rglob("*") if kind_of(child) is not None and child.is_file())
            found = [(child.relative_to(path).as_posix(), child) for child in below]
        elif path.exists():
            found = [(path.name, path)]
        else:
            # The part before the first wildcard, up to its last slash.
            root = Path(argument[: argument.rfind("/", 0, _first_wildcard(argument)) + 1])
            matches = root.glob(path.relative_to(root).as_posix())
            found = [(match.relative_to(root).as_posix(), match) for match in matches if match.is_file()]
        if not found:
            raise DataError(f"{argument}: no such file, and no folder or pattern with files of a known suffix")
        files += [input_file(path, name) for name, path in sorted(found)]
    name, times = Counter(file.name for file in files).most_common(1)[0]
    if times > 1:
        raise DataError(f"{times} inputs are called {name}; give the folder that holds them all instead")
    return files


def _first_wildcard(pattern: str) -> int:
    return min((pattern.find(mark) for mark in "*?[" if mark in pattern), default=len(pattern))


def listing_fingerprint(files: Iterable[InputFile]) -> str:
    """SHA-256 over each file's name, size, and first and last 64 KiB: quick to compare before any work is done.

    The full content is hashed while it is read, and that hash is in the manifest too.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.kind}\0{file.compression}\0".encode("utf-8", "surrogateescape"))
        if file.path.is_file():
            with file.path.open("rb") as stream:
                digest.update(stream.read(_SAMPLE_BYTES))
                stream.seek(max(0, file.size - _SAMPLE_BYTES))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
