"""Starts a run again when it fails, as long as that helps.

    python -m pretrain.supervise --out runs/medium -- deepspeed --hostfile hosts pretrain/run.py --ds_config ... \\
        --config ... out=runs/medium

The command must resume by itself (`checkpoint.resume: auto`, the default). It is started again after a failure, at
once where a checkpoint was published meanwhile, otherwise after a pause that doubles each time; after `--max_failures`
starts in a row without a new checkpoint there is no point in going on. The end is told by `status.json` and `DONE` in
the run folder, not by the launcher's exit status, which loses what ranks say (`pretrain.exit_codes`).

SIGTERM, SIGINT and SIGUSR1 make the run save and leave, through its stop file: that reaches all nodes under every
launcher, and leaves the time that saving takes. Under Slurm, `--requeue` then puts the job back into the queue:

    #SBATCH --requeue --signal=B:USR1@300
    exec python -m pretrain.supervise --requeue --out runs/medium -- srun ... pretrain/run.py ...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pretrain import checkpoint_store as store
from pretrain import status
from pretrain.exit_codes import FINAL, Exit
from pretrain.signals import handling

POLL_SECONDS = 0.2
ORPHAN_SECONDS = 60.0
"""Ranks whose launcher is gone notice it and save; that long they are given."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    policy = Policy(args.max_failures, args.first_pause, args.longest_pause, args.grace, args.restart_stopped)
    with Supervisor(args.command, args.out, policy) as supervisor:
        exit_code = supervisor.run()
    if exit_code is Exit.STOPPED and args.requeue:
        requeue()
    return exit_code


def requeue() -> None:
    """Puts this Slurm job, or this task of an array, back into the queue."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.supervise",
        description="Start a run again when it fails.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the run folder that the command's run writes")
    parser.add_argument("--max_failures", type=int, default=5, help="in a row, without a new checkpoint in between")
    parser.add_argument("--first_pause", type=float, default=10.0, help="seconds after such a failure; doubles")
    parser.add_argument("--longest_pause", type=float, default=600.0, help="seconds")
    parser.add_argument("--grace", type=float, default=300.0, help="seconds that a run has to save and leave")
    parser.add_argument("--restart_stopped", action="store_true", help="also after a signal to the run's own processes")
    parser.add_argument("--requeue", action="store_true", help="scontrol requeue once stopped by a signal")
    parser.add_argument("command", nargs="+", help="-- and the command that launches the run")
    args = parser.parse_args(argv)
    if args.requeue and "SLURM_JOB_ID" not in os.environ:
        parser.error("--requeue: SLURM_JOB_ID is not set; this is no Slurm job")
    return args


@dataclass(frozen=True)
class Policy:
    """When to go on; see `parse_arguments`. Times in seconds."""

    max_failures: int
    first_pause: float
    longest_pause: float
    grace: float
    restart_stopped: bool


class Supervisor:
    """One run's starts. Takes the process's signals over while it is entered as a context.

    Args:
        pass_fds: file descriptors that the command inherits.
    """

    def __init__(self, command: Sequence[str], out: Path, policy: Policy, pass_fds: Sequence[int] = ()) -> None:
        self._command = list(command)
        self._out = out
        self._policy = policy
        self._pass_fds = tuple(pass_fds)
        self._asked: str | None = None
        self._handling = handling(self._on_signal)
        self.starts = 0

    def __enter__(self) -> Supervisor:
        self._handling.__enter__()
        return self

    def __exit__(self, *unused: object) -> None:
        self._handling.__exit__(None, None, None)

    @property
    def asked(self) -> str | None:
        """The signal that asked to stop, if one did."""
        return self._asked

    def run(self) -> Exit:
        """Starts the command until the run is done, cannot go on, makes no progress, or is asked to stop."""
        failures = 0
        while not (self._out / status.DONE_FILE).exists():
            if self._asked is not None:
                return Exit.STOPPED
            before = self._published()
            exit_code = self._start()
            if exit_code in FINAL:
                self._say(f"the run ended: {exit_code.name.lower()}")
                return exit_code
            if exit_code is Exit.STOPPED and (self._asked is not None or not self._policy.restart_stopped):
                self._say("the run was stopped and is saved")
                return exit_code
            failures = 0 if self._published() - before else failures + 1
            if failures >= self._policy.max_failures:
                self._say(f"{failures} starts in a row ended without a new checkpoint, the last with {exit_code.name}")
                return Exit.NO_PROGRESS
            pause = min(self._policy.first_pause * 2 ** (failures - 1), self._policy.longest_pause) if failures else 0.0
            self._say(f"start {self.starts} ended: {exit_code.name.lower()}; starting again in {pause:g} s")
            self._sleep(pause)
        self._say(f"{self._out / status.DONE_FILE} is there: nothing to do")
        return Exit.COMPLETE

    def _start(self) -> Exit:
        """One start of the command, to the end of all its processes here."""
        self.starts += 1
        status.forget(self._out)
        # A session of its own: a terminal's Ctrl-C reaches this process only, and what is left can be ended together.
        process = subprocess.Popen(self._command, start_new_session=True, pass_fds=self._pass_fds)
        asked_at: float | None = None
        left_at: float | None = None
        while _alive(process.pid):
            now = time.monotonic()
            if process.poll() is not None and left_at is None:
                left_at = now
            if self._asked is not None and asked_at is None:
                asked_at = now
                self._say(f"{self._asked}: asking the run to save and leave")
                with contextlib.suppress(OSError):
                    (self._out / "STOP").touch()
            if asked_at is not None and now > asked_at + self._policy.grace:
                self._say(f"the run did not leave in {self._policy.grace:g} s: ending it")
                break
            if left_at is not None and now > left_at + ORPHAN_SECONDS:
                self._say(f"processes are left {ORPHAN_SECONDS:g} s after the command's end: ending them")
                break
            time.sleep(POLL_SECONDS)
        _end_session(process.pid)
        if asked_at is not None:  # a run that came to no step did not see it, and the next start shall not
            (self._out / "STOP").unlink(missing_ok=True)
        launcher_status = process.wait()
        told = status.read(self._out)
        if told is not None:
            return told
        return Exit.USER_ERROR if launcher_status == Exit.USER_ERROR else Exit.CRASH

    def _published(self) -> set[tuple[str, int]]:
        """Checkpoints that are there, told apart from an older one of the same step."""
        found = set()
        for folder in store.finished(self._out / "checkpoints"):
            with contextlib.suppress(OSError):  # deleted meanwhile, or damaged
                found.add((folder.name, (folder / store.MANIFEST_FILE).stat().st_mtime_ns))
        return found

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._asked is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            print(f"supervise: {line}", file=sys.stderr, flush=True)


def _alive(session: int) -> bool:
    """Whether a process of the group that the command began is left."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def _end_session(session: int) -> None:
    """Ends what the launcher left behind: ranks without a launcher would hold the port and the GPUs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
