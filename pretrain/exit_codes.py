"""Exit statuses of the run, of its supervisor and of the preflight, all in one place.

A launcher does not always hand a rank's status on: torchrun makes 1 of any failure, and a rank that a signal ends
becomes 256 minus the signal's number. `status.json` in the run folder tells the same beyond doubt (`pretrain.status`).
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a process of ours tells by leaving."""

    COMPLETE = 0
    """All steps are done and the last checkpoint is on disk."""
    CRASH = 1
    """A traceback. The supervisor starts the run again."""
    USER_ERROR = 2
    """A mistake in files or arguments, told in one line. Starting again would not help, so the supervisor doesn't."""
    SAVE_FAILED = 74
    """The checkpoint that was to be the last could not be written, or the disk was full at the start. The supervisor
    starts the run again."""
    STOPPED = 75
    """A signal, the stop file or the end of the allowed time: the run is saved and goes on when it is started again."""
    HUNG = 76
    """A step took too long. Every rank's stacks are in the run folder's logs. The supervisor starts the run again."""
    DIVERGED = 77
    """Rolled back to the same checkpoint too often. The supervisor gives up."""
    RANKS_DIFFER = 78
    """Weights are not the same on all ranks: memory or a link corrupts data. The supervisor gives up."""
    NO_PROGRESS = 79
    """Of the supervisor: several starts in a row ended without a new checkpoint."""
    NODES_DIFFER = 80
    """Of the preflight: a node is not fit for the run."""


FINAL = frozenset({Exit.COMPLETE, Exit.USER_ERROR, Exit.DIVERGED, Exit.RANKS_DIFFER})
"""After these the supervisor does not start the run again."""
