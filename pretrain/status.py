"""`status.json` of a run folder: how the last start ended. Launchers garble exit statuses; a file does not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from data_prep.durable import write_atomic
from pretrain.exit_codes import Exit

STATUS_FILE = "status.json"
DONE_FILE = "DONE"
"""There once all steps are done. Whoever wants to train on (a larger train.steps) deletes it, or just runs run.py."""


def forget(out: Path) -> None:
    """Forgets how the last start ended."""
    (out / STATUS_FILE).unlink(missing_ok=True)


def clear(out: Path) -> None:
    """A run begins: it is not done, and how the last start ended no longer counts."""
    forget(out)
    (out / DONE_FILE).unlink(missing_ok=True)


def write(out: Path, exit_code: Exit, reason: str) -> None:
    """Tells how this start ends. A disk that is full does not change the exit status."""
    with contextlib.suppress(OSError):
        content = {"exit_code": int(exit_code), "outcome": exit_code.name.lower(), "reason": reason}
        write_atomic(out / STATUS_FILE, (json.dumps(content) + "\n").encode())
        if exit_code is Exit.COMPLETE:
            write_atomic(out / DONE_FILE, b"")


def read(out: Path) -> Exit | None:
    """How the last start ended, or None where it could not tell: it was killed."""
    try:
        return Exit(json.loads((out / STATUS_FILE).read_text(encoding="utf-8"))["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
