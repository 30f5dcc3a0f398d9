"""Which split a document belongs to: decided by its content alone."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation")
_KEY_BYTES = 1 << 20


def split_of(utf8: bytes, validation_fraction: float) -> str:
    """Split of the document with this UTF-8 text.

    A hash of the first mebibyte decides, so equal documents share a split, a document keeps its split when
    the corpus grows, and raising the fraction only moves documents from train to validation.
    """
    digest = hashlib.blake2b(utf8[:_KEY_BYTES], digest_size=8, person=b"deeploop-split").digest()
    return "validation" if int.from_bytes(digest, "little") < validation_fraction * 2.0**64 else "train"
