"""The folder of one run of a study: how far it is, whether it is still that run, and who is at it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pretrain import status
from pretrain.ablate.plan import PlannedRun
from pretrain.config_file import as_tree, read_yaml
from pretrain.errors import ConfigError
from pretrain.exit_codes import Exit

FREE_SECTIONS = ("out", "checkpoint", "monitor")
"""May change between the starts of a study: they do not change what is learnt."""
LOCK_FILE = "study.lock"
POLL_SECONDS = 0.5


class State(Enum):
    """How far a run is."""

    WAITING = "waiting"
    STARTED = "started"
    FAILED = "failed"
    GAVE_UP = "gave up"
    """Its loss did not come back from bad steps (`Exit.DIVERGED`): a result."""
    COMPLETE = "complete"

    @property
    def is_result(self) -> bool:
        return self in (State.GAVE_UP, State.COMPLETE)


FAILURES = frozenset({Exit.USER_ERROR, Exit.RANKS_DIFFER})


@dataclass(frozen=True)
class Curve:
    """What metrics.jsonl says, in its order."""

    validation: list[tuple[int, float]]
    """(tokens, loss in nats per token); a loss may be infinite or not a number."""
    flops: int
    """Matrix-product FLOPs that the last line of training counts."""


def state_of(run: PlannedRun) -> State:
    out = Path(run.config.out)
    if (out / status.DONE_FILE).exists():
        return State.COMPLETE
    ended = status.read(out)
    if ended is Exit.DIVERGED:
        return State.GAVE_UP
    if ended in FAILURES:
        return State.FAILED
    return State.STARTED if (out / "config.yaml").exists() else State.WAITING


def check_unchanged(run: PlannedRun) -> None:
    """Raises ConfigError where the folder holds a run of other settings than the study's now."""
    path = Path(run.config.out) / "config.yaml"
    if not path.exists():
        return
    planned = json.loads(json.dumps(as_tree(run.config)))
    for key, there, here in _differences(read_yaml(path), planned, ()):
        raise ConfigError(
            f"{path}: {key} is {there!r} there and {here!r} in the study; "
            "delete the run's folder, or give the study another `out`"
        )


def read_curve(run: PlannedRun) -> Curve:
    """Of a run that may not have begun, or may have been cut short."""
    validation, flops = [], 0
    path = Path(run.config.out) / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the last one, half written
        if "val_loss" in values:
            validation.append((int(values["tokens"]), float(values["val_loss"])))
        flops = int(values.get("flops", flops))
    return Curve(validation, flops)


@contextlib.contextmanager
def held(run: PlannedRun, waiting: Callable[[], None]) -> Iterator[int]:
    """Holds the folder, after whoever holds it now; `waiting` is called once if that takes time.

    Gives a file descriptor. A run that inherits it goes on holding the folder if this process is killed, so that two
    never write to it at once.
    """
    path = Path(run.config.out) / LOCK_FILE
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waiting()
                told = True
                time.sleep(POLL_SECONDS)
        yield file.fileno()


def _differences(there: Any, here: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value there, value here) of keys that both have; sections in which a run may change are left out."""
    if not path or (isinstance(there, dict) and isinstance(here, dict)):
        for key in there.keys() & here.keys():
            if path or key not in FREE_SECTIONS:
                yield from _differences(there[key], here[key], (*path, key))
    elif there != here:
        yield ".".join(path), there, here
