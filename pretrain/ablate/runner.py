"""Trains the runs of a study, one after another, each by run.py under the supervisor of `pretrain.supervise`.

A run that is finished, or that diverged, is left alone; one that was killed goes on from its newest checkpoint. Ctrl-C
or SIGTERM makes the run under way save and leave, and ends the study; the same command goes on.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from data_prep.durable import make_folder, write_atomic
from pretrain.ablate.folder import State, held, read_curve, state_of
from pretrain.ablate.plan import PlannedRun
from pretrain.ablate.study import Study
from pretrain.ablate.study_file import launch_command
from pretrain.errors import PretrainError
from pretrain.exit_codes import Exit
from pretrain.supervise import Policy, Supervisor

POLICY = Policy(max_failures=2, first_pause=5.0, longest_pause=600.0, grace=300.0, restart_stopped=False)
"""A study has other runs to train: one that crashes twice without a new checkpoint is left for later."""
RUN_SCRIPT = Path(__file__).resolve().parents[1] / "run.py"


def train_all(
    study: Study, runs: Sequence[PlannedRun], say: Callable[[str], None], after_each: Callable[[], None]
) -> Exit:
    """STOPPED after a request to stop, CRASH where a run failed, COMPLETE otherwise."""
    failed = []
    for number, run in enumerate(runs, 1):
        if not state_of(run).is_result:
            say(f"[{number}/{len(runs)}] {run.label}: {'goes on' if state_of(run) is State.STARTED else 'starts'}")
            exit_code = train(study, run, say)
            if exit_code is Exit.STOPPED:
                say(f"stopped; {run.label} is saved, and the same command goes on from there")
                return exit_code
            if not state_of(run).is_result:
                failed.append(run.label)
            after_each()
        say(f"[{number}/{len(runs)}] {run.label}: {outcome(run)}")
    if failed:
        say(f"{len(failed)} of {len(runs)} runs failed and are tried again by the same command: {', '.join(failed)}")
    return Exit.CRASH if failed else Exit.COMPLETE


def train(study: Study, run: PlannedRun, say: Callable[[str], None]) -> Exit:
    """One run to its end, or to a request to stop."""
    config, ds_config = write_config(run), Path(study.ds_config)
    command = [*launch_command(study.launcher), str(RUN_SCRIPT), "--ds_config", str(ds_config), "--config", str(config)]
    began, cpu_before = time.monotonic(), _cpu_seconds()
    with held(run, lambda: say(f"{run.label}: another process is at this run; waiting for its end")) as lock:
        if state_of(run).is_result:
            return Exit.COMPLETE
        with Supervisor([*command, "--resume", "auto"], Path(run.config.out), POLICY, pass_fds=(lock,)) as supervisor:
            exit_code = supervisor.run()
    say(f"{run.label}: {time.monotonic() - began:.0f} s, {_cpu_seconds() - cpu_before:.0f} CPU seconds")
    return Exit.STOPPED if supervisor.asked and exit_code is not Exit.DIVERGED else exit_code


def write_config(run: PlannedRun) -> Path:
    """`run.yaml` in the run's folder: what run.py is given, for the same run by hand as well. Raises PretrainError."""
    out = Path(run.config.out)
    try:
        make_folder(out)
        write_atomic(out / "run.yaml", yaml.safe_dump(run.tree, sort_keys=False).encode())
    except OSError as error:
        raise PretrainError(f"{out}: cannot be written: {error.strerror}") from None
    return out / "run.yaml"


def outcome(run: PlannedRun) -> str:
    """How far a run is, in a few words."""
    state, curve = state_of(run), read_curve(run)
    loss = f", validation loss {curve.validation[-1][1]:.4f}" if curve.validation else ""
    return f"{state.value}{loss}"


def _cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended, theirs included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
