"""What monitoring costs a run: each kind of measurement in training steps, and their mean share of training time.

    python -m benchmarks.monitoring --ds_config ds_configs/zero2_bf16.json --config pretrain/configs/gpt2_medium.yaml \\
        data.path=data/mine

One process, or ranks under a launcher, train on the run's own data; plain steps and measured ones take turns, so that a
machine that slows down slows all of them. On a CPU, what counts is the processor time of this process, which others on
the machine change little. Writes go to a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from deeploop_model import DeepLoopModel
from pretrain.config import RunConfig
from pretrain.config_file import load_config
from pretrain.data_feed import TrainFeed
from pretrain.ds_config import accumulation_steps, load_ds_config
from pretrain.engine import build_engine, train_step
from pretrain.monitor.monitoring import Monitoring
from pretrain.monitor.run_log import RunLog
from pretrain.progress import Progress
from pretrain.ranks import Ranks, process_group
from pretrain.recompute import chosen_recompute
from pretrain.run_data import open_data

EVERY = 1_000_000
"""Steps of the run; measurements are asked for by their step's number."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Share of training time that monitoring takes.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ds_config", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    ranks = Ranks.from_environment()
    with tempfile.TemporaryDirectory() as folder, process_group(ranks):
        config = load_config(args.config, [*args.overrides, f"out={folder}"])
        with contextlib.redirect_stdout(io.StringIO()):  # the log's lines
            costs = measure(config, load_ds_config(args.ds_config, config, ranks.world_size), ranks, args.repeats)
    if ranks.is_main:
        report(config, costs)


def measure(config: RunConfig, ds_config: dict[str, object], ranks: Ranks, repeats: int) -> dict[str, list[float]]:
    """Seconds by kind: a plain step; a step with one measurement; what comes beside steps."""
    data = open_data(config)
    engine = build_engine(DeepLoopModel(config.model, recompute=chosen_recompute(config)[0]), config, ds_config)
    log = RunLog(Path(config.out), engine.monitor, first_step=0, steps=EVERY, tokens_per_step=1, is_main=ranks.is_main)
    intervals = dataclasses.replace(config.monitor, kappa_every=3, detail_every=5, log_every=EVERY)
    monitoring = Monitoring(engine, dataclasses.replace(config, monitor=intervals), data, ranks, log, 0)
    feed = TrainFeed(data, config, accumulation_steps(config, ranks.world_size), ranks)
    progress, batch = Progress.of(None, config.recovery), 0

    def step(number: int, *, measured: bool = True) -> None:
        nonlocal batch
        batches = feed.micro_batches(batch)
        batch += 1
        if not measured:
            train_step(engine, batches, config.model.num_rounds, config.train).item()
            return
        monitoring.restart(number - 1)
        with monitoring.of_step(number) as before_update:
            loss = train_step(
                engine, batches, config.model.num_rounds, config.train, monitoring.times, before_update
            ).item()
        monitoring.after_step(number, loss=loss, lr=0.0, num_rounds=1, progress=progress, last=number % 7 == 0)

    kinds: dict[str, Callable[[], None]] = {
        "plain": lambda: step(1, measured=False),
        "timed": lambda: step(1),
        "kappa": lambda: step(3),
        "detail": lambda: step(5),
        "log": lambda: step(7),
        "loop": lambda: monitoring.loop(1, last=True),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(repeats + 1):
        for kind, work in kinds.items():
            seconds[kind].append(timed(work, ranks.device))
            if repeat == 0:
                seconds[kind].clear()  # first uses
        for _ in range(3):  # their difference is small
            for kind in ("plain", "timed"):
                seconds[kind].append(timed(kinds[kind], ranks.device))
    feed.close()
    log.close()
    return seconds


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds; on a CPU those of the processor."""
    if device.type != "cuda":
        begun = time.process_time()
        work()
        return time.process_time() - begun
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def report(config: RunConfig, seconds: dict[str, list[float]]) -> None:
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    plain, monitor = medians["plain"], config.monitor
    print(f"a step takes {plain:.3f} s, median of {len(seconds['plain'])}; kinds of measurement, in steps:")
    total = 0.0
    for kind, name, every, beside in (
        ("timed", "times of a step's parts", 1, False),
        ("log", "log line, points", monitor.log_every, False),
        ("kappa", "kappa_R", monitor.kappa_every, False),
        ("detail", "gradient norms, collectives", monitor.detail_every, False),
        ("loop", "loop health, with pictures", monitor.loop_health_every, True),
    ):
        cost = medians[kind] / plain - (0.0 if beside else 1.0)
        share = cost / every if every else 0.0
        total += share
        when = f"every {every} steps: {share:7.2%}" if every else "off"
        print(f"  {name:<28} {cost:6.2f}   {when}")
    print(f"mean overhead {total:.2%}")


if __name__ == "__main__":
    main()
