"""Runs a study: residual rule x rounds x seed x whatever else, and writes the table of validation losses.

    python -m pretrain.ablate pretrain/studies/small.yaml
    python -m pretrain.ablate pretrain/studies/small.yaml --list
    python -m pretrain.ablate pretrain/studies/paper_small.yaml data.path=/data/fineweb-edu --index 3
    sbatch pretrain/launch/study.sbatch pretrain/studies/paper_small.yaml

Finished runs are not repeated; killed ones go on. Under a Slurm array, SLURM_ARRAY_TASK_ID is the index.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.ablate.folder import check_unchanged
from pretrain.ablate.listing import listing
from pretrain.ablate.plan import PlannedRun, distinct, plan
from pretrain.ablate.results import read_results
from pretrain.ablate.runner import train_all
from pretrain.ablate.study import Study
from pretrain.ablate.study_file import load_study
from pretrain.ablate.table import write_tables
from pretrain.errors import USER_ERRORS, ConfigError
from pretrain.exit_codes import Exit
from pretrain.supervise import requeue


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for a mistake told in one line, 75 when stopped, 1 when runs failed."""
    args = parse_arguments(argv)
    try:
        study = load_study(args.study)
        try:
            runs = plan(study, args.overrides)
        except USER_ERRORS as error:
            raise ConfigError(f"{args.study}: {error}") from None
        for run in runs:
            check_unchanged(run)
        if args.list:
            print(listing(distinct(runs)))
            return Exit.COMPLETE
        if args.table:
            write_results(study, runs)
            return Exit.COMPLETE
        trained = distinct(runs)
        index = _index(args.index, len(trained))
        exit_code = run_study(study, runs) if index is None else train_all(study, [trained[index]], say, lambda: None)
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        return Exit.USER_ERROR
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return Exit.STOPPED
    if exit_code is Exit.STOPPED and args.requeue:
        requeue()
    return exit_code


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.ablate", description="Train the runs of a study and write the table of their losses."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the runs with their index, and train nothing")
    what.add_argument("--table", action="store_true", help="write tables and plots of what there is, and train nothing")
    what.add_argument("--index", type=int, help="train this run only; SLURM_ARRAY_TASK_ID where it is set")
    parser.add_argument("--requeue", action="store_true", help="scontrol requeue once stopped by a signal")
    parser.add_argument("study", type=Path, metavar="STUDY.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of every run, over the study file")
    args = parser.parse_intermixed_args(argv)
    if args.requeue and "SLURM_JOB_ID" not in os.environ:
        parser.error("--requeue: SLURM_JOB_ID is not set; this is no Slurm job")
    return args


def run_study(study: Study, runs: Sequence[PlannedRun]) -> Exit:
    """All runs; the tables are there after the first."""

    def tables() -> None:
        write_tables(study, read_results(runs, study.divergence))

    exit_code = train_all(study, distinct(runs), say, tables)
    if exit_code is not Exit.STOPPED:
        write_results(study, runs)
    return exit_code


def write_results(study: Study, runs: Sequence[PlannedRun]) -> None:
    from pretrain.ablate.plots import write_plots  # a second to import

    Path(study.out).mkdir(parents=True, exist_ok=True)
    results = read_results(runs, study.divergence)
    write_tables(study, results)
    plots = write_plots(study, results)
    print((Path(study.out) / "table.md").read_text(encoding="utf-8"))
    print("\n".join(str(path) for path in (Path(study.out) / "table.md", Path(study.out) / "table.csv", *plots)))


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} study: {line}", file=sys.stderr, flush=True)


def _index(given: int | None, count: int) -> int | None:
    """The run of --index or of a Slurm array's task; None for all of them."""
    of_array = os.environ.get("SLURM_ARRAY_TASK_ID")
    if given is None and of_array is None:
        return None
    index = given if given is not None else int(of_array or 0)
    if not 0 <= index < count:
        origin = "--index" if given is not None else "SLURM_ARRAY_TASK_ID"
        raise ConfigError(f"{origin}: {index}: the study's runs are 0 to {count - 1}")
    return index


if __name__ == "__main__":
    sys.exit(main())
