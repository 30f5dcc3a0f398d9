"""Documents left out on the user's wish: by length, or by a predicate of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.durable import sha256_of_file
from data_prep.errors import DataError

Predicate = Callable[[str, Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Filters:
    """Bounds in characters, and `FILE.py:FUNCTION`, called as `function(text, fields)`; true keeps the document."""

    min_chars: int = 0
    max_chars: int | None = None
    predicate: str | None = None

    def settings(self) -> dict[str, Any]:
        """What of this determines the result: the predicate by its file's checksum."""
        predicate = None
        if self.predicate is not None:
            file, function = self._predicate_parts()
            predicate = [function, sha256_of_file(file)]
        return {"min_chars": self.min_chars, "max_chars": self.max_chars, "predicate": predicate}

    def _predicate_parts(self) -> tuple[Path, str]:
        file, _, function = (self.predicate or "").rpartition(":")
        path = Path(file)
        if not file or not path.is_file():
            raise DataError(f"--filter {self.predicate}: expected FILE.py:FUNCTION with an existing file")
        return path, function

    def load(self) -> Predicate | None:
        """Imports the predicate.

        Raises:
            DataError: no such file or function.
        """
        if self.predicate is None:
            return None
        path, name = self._predicate_parts()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise DataError(f"{path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            function = getattr(module, name)
        except Exception as error:  # the user's file may raise anything
            raise DataError(f"--filter {self.predicate}: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise DataError(f"--filter {self.predicate}: {name} is not a function")
        predicate: Predicate = function
        return predicate

    def reason(self, text: str, length: int, fields: Mapping[str, Any], predicate: Predicate | None) -> str | None:
        """Why the document is left out, or None to keep it."""
        if length < self.min_chars:
            return "too_short"
        if self.max_chars is not None and length > self.max_chars:
            return "too_long"
        if predicate is None:
            return None
        try:
            keep = predicate(text, fields)
        except Exception as error:  # the user's function may raise anything
            raise DataError(f"--filter {self.predicate}: {type(error).__name__}: {error}") from error
        return None if keep else "filtered"
