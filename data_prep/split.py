"""Which split a document belongs to: decided by its content alone."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation")
_KEY_BYTES = 1 << 20


class SplitKey:
    """Hash of a document's first mebibyte of UTF-8.

    Equal documents share a split, a document keeps its split when the corpus grows, and raising the fraction only
    moves documents from train to validation.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8, person=b"deeploop-split")
        self._left = _KEY_BYTES

    def update(self, utf8: bytes) -> None:
        """Adds the next bytes of the document, in parts of any size."""
        if self._left:
            part = utf8[: self._left]
            self._digest.update(part)
            self._left -= len(part)

    def split(self, validation_fraction: float) -> str:
        """Name of the split."""
        value = int.from_bytes(self._digest.digest(), "little")
        return "validation" if value < validation_fraction * 2.0**64 else "train"
