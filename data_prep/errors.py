"""The one error of this package: something the user can put right."""

from __future__ import annotations


class DataError(Exception):
    """A cause outside the program: a bad input, setting, file or folder.

    The message is one line that names the file, key or offset, what was found and what would work.
    """
