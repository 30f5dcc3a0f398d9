"""Where a run stands, and how it goes back to where it stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from pretrain import checkpoint
from pretrain import checkpoint_store as store
from pretrain.bad_steps import BadSteps, batch_of_step
from pretrain.config import RecoveryConfig
from pretrain.data_feed import TrainFeed
from pretrain.engine import Engine
from pretrain.errors import DivergedError
from pretrain.monitor.run_log import RunLog
from pretrain.ranks import Ranks


@dataclass
class Progress:
    """The same on every rank."""

    bad_steps: BadSteps
    step: int = 0
    """Optimizer steps done."""
    passed_over: list[int] = field(default_factory=list)
    """Global batches left out."""
    flops: int = 0
    """Matrix-product FLOPs of these steps."""
    rollbacks: int = 0
    """Of the whole run, as far as its metrics tell."""

    @classmethod
    def of(cls, saved: checkpoint.RunState | None, config: RecoveryConfig) -> Progress:
        """Where a checkpoint stands, or the beginning."""
        if saved is None:
            return cls(BadSteps(config, {}))
        return cls(BadSteps(config, saved.bad_steps), saved.step, list(saved.passed_over), saved.flops)

    @property
    def batch(self) -> int:
        """The global batch that the next step trains on."""
        return batch_of_step(self.step, self.passed_over)

    def step_done(self, loss: float, *, update_skipped: bool) -> str | None:
        """Takes in a step. Returns why it was a bad one, or None."""
        fault = self.bad_steps.observe(self.batch, loss, update_skipped=update_skipped)
        self.step += 1
        return fault


class RollBack:
    """Goes back to the newest whole checkpoint that was saved after a good step.

    Args:
        root: the run folder's `checkpoints/`.
        group: for the ranks' agreement on which checkpoint that is.
    """

    def __init__(self, root: Path, config: RecoveryConfig, ranks: Ranks, group: dist.ProcessGroup) -> None:
        self._root = root
        self._config = config
        self._ranks = ranks
        self._group = group
        self._times: dict[Path, int] = {}

    def __call__(self, engine: Engine, progress: Progress, log: RunLog, feed: TrainFeed) -> Progress:
        """Loads the checkpoint into `engine`; every rank must call it. Returns where the run stands now.

        Checkpoints of later steps are deleted: they belong to a branch that is left. Raises DivergedError.
        """
        target = next(
            (
                folder
                for folder in store.finished(self._root)
                if checkpoint.fault_of(folder, self._ranks, self._group) is None
                and not checkpoint.read_state(folder).bad_steps.get("row")
            ),
            None,
        )
        row = progress.bad_steps.to_pass_over()
        if target is None:
            raise DivergedError(
                f"{len(row)} bad steps in a row up to step {progress.step}, and {self._root} has no whole checkpoint "
                "of a good step to go back to; a lower optimizer.lr or a longer schedule.warmup_steps may help"
            )
        self._times[target] = self._times.get(target, 0) + 1
        if self._times[target] > self._config.max_rollbacks:
            raise DivergedError(
                f"{len(row)} bad steps in a row up to step {progress.step} after {self._config.max_rollbacks} returns "
                f"to {target}; resume from an earlier checkpoint, or with a lower optimizer.lr"
            )
        checkpoint.load(engine, target)
        if self._ranks.is_main:
            store.drop_after(self._root, store.step_of(target))
        dist.barrier(group=self._group)
        back = Progress.of(checkpoint.read_state(target), self._config)
        back.bad_steps.total = progress.bad_steps.total
        back.passed_over = sorted(
            {*progress.passed_over, *row}
        )  # more than the checkpoint knows of, on a second return
        back.rollbacks = progress.rollbacks + 1
        log.go_back(back.step)
        log.event(
            back.step,
            "rollback",
            f"back to {target} after {len(row)} bad steps up to step {progress.step}, passing over their samples",
            {"rollbacks": back.rollbacks, "bad_steps": back.bad_steps.total},
            from_step=progress.step,
            batches=row,
            sample_ids=[feed.sample_ids(batch) for batch in row],
        )
        return back
