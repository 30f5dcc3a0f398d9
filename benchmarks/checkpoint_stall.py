"""How long training stands still for a checkpoint: written in the background, and written at once.

    python -m benchmarks.checkpoint_stall --folder /scratch/somewhere      # a disk like the cluster's, not a tmpfs
    python -m benchmarks.checkpoint_stall --folder /scratch/somewhere --preset gpt2-medium --saves 1

One process trains a model on random tokens and saves it several times both ways, in turn. It prints, for both ways,
the median time that a save holds training up, their ratio, and how much slower the steps are during which a thread is
writing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.presets import PRESETS, preset_fields
from pretrain import checkpoint
from pretrain import checkpoint_store as store
from pretrain.checkpoint_files import keep_in_host_memory
from pretrain.config import CheckpointConfig, DataConfig, RunConfig, TrainConfig
from pretrain.data_feed import Batch
from pretrain.ds_config import load_ds_config
from pretrain.engine import Engine, build_engine, train_step
from pretrain.monitor.run_log import RunLog
from pretrain.ranks import Ranks, patient_group, process_group
from pretrain.saver import Saver

CONTEXT = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time that checkpoints take from training.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write, in a folder deleted at the end")
    parser.add_argument("--ds_config", type=Path, default=Path("ds_configs/zero2_bf16_cpu.json"))
    parser.add_argument("--preset", choices=sorted(PRESETS), help="in place of the next two, with GPT-2's vocabulary")
    parser.add_argument("--d_model", type=int, default=768)
    parser.add_argument("--num_blocks", type=int, default=6)
    parser.add_argument("--saves", type=int, default=5, help="of each way")
    args = parser.parse_args(argv)
    size: dict[str, Any] = {
        "num_blocks": args.num_blocks, "d_model": args.d_model, "num_heads": args.d_model // 64, "vocab_size": 4096,
    }  # fmt: skip
    if args.preset:
        size = preset_fields(args.preset)
    model = DeepLoopConfig(**{**size, "num_rounds": 1, "context_length": CONTEXT})
    out = Path(tempfile.mkdtemp(prefix="checkpoint_stall_", dir=args.folder))
    train = TrainConfig(steps=1000, global_batch_size=1, micro_batch_size=1, recompute="none")
    config = RunConfig(out=str(out), data=DataConfig(""), train=train, model=model)
    ranks = Ranks.from_environment()
    try:
        with process_group(ranks):
            measure(config, load_ds_config(args.ds_config, config, 1), ranks, out, args.saves)
    finally:
        shutil.rmtree(out)


def measure(config: RunConfig, ds_config: dict[str, object], ranks: Ranks, out: Path, saves: int) -> None:
    engine = build_engine(DeepLoopModel(config.model, recompute="none"), config, ds_config)
    keep_in_host_memory(engine)
    log = RunLog(out, engine.monitor, first_step=0, steps=1000, tokens_per_step=CONTEXT, is_main=False)
    group = patient_group(3600)
    ways = {
        name: Saver(engine, out / name, CheckpointConfig(background=background, keep_last=1), ranks, group, log)
        for name, background in (("at once", False), ("in the background", True))
    }
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    plain = [timed_step(engine, config) for _ in range(5)][2:]
    beside: list[float] = []
    for number in range(saves + 1):
        for name, saver in ways.items():
            start = time.perf_counter()
            saver.save(state_at(number + 1), wait=False)
            stalls[name].append(time.perf_counter() - start)
            while saver.under_way and not saver.written:
                beside.append(timed_step(engine, config))
            start = time.perf_counter()
            saver.conclude()
            stalls[name][-1] += time.perf_counter() - start
            plain.append(timed_step(engine, config))
    # The first save of a run makes the memory that later ones use again.
    first, medians = stalls["in the background"][0], {n: statistics.median(s[1:]) for n, s in stalls.items()}
    size = sum(file.stat().st_size for file in store.finished(out / "at once")[0].iterdir())
    parameters = sum(weight.numel() for weight in engine.module.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, checkpoint of {size / 1e6:.0f} MB, median of {saves} saves each way")
    for name, seconds in medians.items():
        print(f"training waits, written {name:<18} {seconds:8.3f} s")
    print(f"ratio {medians['in the background'] / medians['at once']:.3f} (the first save of a run: {first:.3f} s)")
    if beside:
        slower = statistics.median(beside) / statistics.median(plain)
        print(f"steps beside a writing thread take {slower:.2f} times a plain step, {statistics.median(plain):.3f} s")


def timed_step(engine: Engine, config: RunConfig) -> float:
    tokens = torch.randint(0, 4096, (1, CONTEXT + 1))
    start = time.perf_counter()
    train_step(engine, [Batch(tokens[:, :-1], tokens[:, 1:], None)], 1, config.train)
    return time.perf_counter() - start


def state_at(step: int) -> checkpoint.RunState:
    return checkpoint.RunState(
        step=step, samples=0, global_batch_size=1, seed=0, world_size=1, zero_stage=2, model={}, alpha=1.0,
        data_fingerprint="", tokenizer_sha256=None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
