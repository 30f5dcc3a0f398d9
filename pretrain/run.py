"""Pretrains a DeepLoop model. One process, many ranks or many nodes, CPU or GPU, by the same script:

deepspeed pretrain/run.py --ds_config ds_configs/zero2_bf16.json --config pretrain/configs/gpt2_medium.yaml
deepspeed --hostfile hosts pretrain/run.py --ds_config ... --config ... train.steps=2000 optimizer.lr=3e-4
torchrun --nproc-per-node 8 pretrain/run.py --ds_config ... --config ...
python pretrain/run.py --ds_config ... --config ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run by path: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from typing import Any

import torch.distributed as dist

from data_prep.tokenizer import Tokenizer, load_tokenizer
from deeploop_model import DeepLoopModel
from pretrain import checkpoint, status
from pretrain.agreement import agree
from pretrain.checkpoint_files import keep_in_host_memory
from pretrain.checkpoint_store import remove_leftovers
from pretrain.config import RunConfig
from pretrain.config_file import load_config
from pretrain.data_feed import TrainFeed
from pretrain.ds_config import accumulation_steps, load_ds_config
from pretrain.engine import Engine, build_engine, compile_blocks, set_learning_rate, train_step, update_skipped
from pretrain.errors import USER_ERRORS, exit_code_of
from pretrain.exit_codes import Exit
from pretrain.freezing import freeze
from pretrain.generation import sample_text
from pretrain.monitor.monitoring import Monitoring
from pretrain.monitor.run_log import RunLog
from pretrain.progress import Progress, RollBack
from pretrain.provenance import write_resolved_config
from pretrain.rank_check import compare_ranks
from pretrain.ranks import Ranks, end_process, patient_group, process_group, together
from pretrain.recompute import chosen_recompute
from pretrain.report import close_log
from pretrain.rounds import rounds_of_step
from pretrain.run_data import RunData, open_data
from pretrain.saver import Saver
from pretrain.schedule import learning_rate
from pretrain.seeding import seed_step
from pretrain.stopping import StopRequests
from pretrain.validation import validation_loss
from pretrain.watchdog import Watchdog
from pretrain.weights import load_initial_weights


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, see `pretrain.exit_codes`; an error of the user's is told in one line."""
    args = parse_arguments(argv)
    ranks = Ranks.from_environment()
    out: Path | None = None
    try:
        config = load_config(args.config, [*args.overrides, *args.resume_override])
        out = Path(config.out)
        ds_config = load_ds_config(args.ds_config, config, ranks.world_size)
        with (
            process_group(ranks, config.recovery.collective_seconds),
            StopRequests(out / "STOP", config.recovery.stop_after_minutes, is_main=ranks.is_main) as stop,
            Watchdog(out / "logs", ranks.rank, config.recovery) as watchdog,
        ):
            exit_code, reason = train(config, ds_config, ranks, stop, watchdog)
            if ranks.is_main:
                status.write(out, exit_code, reason)
            dist.barrier()  # whoever waits for a rank on another node finds the status
    except USER_ERRORS as error:
        exit_code, reason = exit_code_of(error), str(error)
        where = f" (rank {ranks.rank})" if ranks.world_size > 1 else ""
        sys.stderr.write(f"error{where}: {error}\n")
        if ranks.is_main and out is not None:
            status.write(out, exit_code, reason)
    return exit_code


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a DeepLoop model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.yaml", help="the run: model, data, ...")
    parser.add_argument("--ds_config", type=Path, required=True, metavar="FILE.json", help="DeepSpeed's configuration")
    parser.add_argument(
        "--resume", dest="resume_override", type=lambda v: [f"checkpoint.resume={v}"], default=[],
        metavar="auto|never|PATH", help="short for checkpoint.resume=...",
    )  # fmt: skip
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the YAML file")
    return parser.parse_intermixed_args(argv)


def train(
    config: RunConfig, ds_config: dict[str, Any], ranks: Ranks, stop: StopRequests, watchdog: Watchdog
) -> tuple[Exit, str]:
    """The run, from its first or last saved step to its last or to a request to stop. Returns how it ended, and why."""
    out, origin = Path(config.out), ""
    patient = patient_group(config.recovery.checkpoint_seconds)
    resumed = checkpoint.choose(config.checkpoint.resume, out / "checkpoints", ranks, patient)
    recompute, reason = chosen_recompute(config)
    with together():
        data = open_data(config)
        tokenizer = load_tokenizer(data.tokenizer_folder) if config.monitor.sample_tokens else None
        saved = checkpoint.read_state(resumed) if resumed else None
        model = DeepLoopModel(config.model, seed=config.train.seed, recompute=recompute)
        if config.train.initial_weights and not saved:
            origin = "\n" + load_initial_weights(model, Path(config.train.initial_weights), data.tokenizer_sha256)
        frozen = freeze(model, config.train.trainable, config.train.frozen)
        state_of = partial(run_state, config, ds_config, data, ranks, frozen)
        progress = Progress.of(saved, config.recovery)
        if resumed and saved:
            checkpoint.check_match(resumed, saved, state_of(progress), config.checkpoint.allow_differences)
        if ranks.is_main:
            write_resolved_config(out, config, ds_config)
            status.clear(out)
            remove_leftovers(out / "checkpoints")

    engine = build_engine(model, config, ds_config)
    keep_in_host_memory(engine)
    if resumed:
        checkpoint.load(engine, resumed)
    accumulation = accumulation_steps(config, ranks.world_size)
    feed = TrainFeed(data, config, accumulation, ranks)
    log = RunLog(
        out,
        engine.monitor,
        first_step=progress.step,
        steps=config.train.steps,
        tokens_per_step=config.train.global_batch_size * config.model.context_length,
        is_main=ranks.is_main,
    )
    if reason:
        log.say(reason)
    if config.train.compile:
        log.say(compile_blocks(engine.module, ranks.device))
    log.say(headline(config, ranks, accumulation, progress.step, resumed) + origin)
    saver = Saver(engine, out / "checkpoints", config.checkpoint, ranks, patient, log)
    roll_back = RollBack(out / "checkpoints", config.recovery, ranks, patient)
    monitoring = Monitoring(engine, config, data, ranks, log, progress.step)
    progress.rollbacks = log.rollbacks

    while progress.step < config.train.steps:
        step, batch = progress.step, progress.batch
        seed_step(config.train.seed, step, ranks.rank)
        lr = learning_rate(step, config.optimizer.lr, config.train.steps, config.schedule)
        set_learning_rate(engine, lr)
        num_rounds = rounds_of_step(config.train.rounds, config.model.num_rounds, config.train.seed, step)
        with monitoring.of_step(step + 1) as before_update:
            micro_batches = feed.micro_batches(batch)
            loss = train_step(engine, micro_batches, num_rounds, config.train, monitoring.times, before_update)
        agreed = agree(loss, stop=stop.reason is not None, written=saver.written)
        step = watchdog.step_done(step + 1)
        progress.flops += monitoring.flops(num_rounds)
        last = step == config.train.steps
        fault = progress.step_done(agreed.loss, update_skipped=update_skipped(engine))
        if fault:
            log.bad_step(step, fault, progress.bad_steps.total, feed.sample_ids(batch))
        if progress.bad_steps.to_pass_over():
            with watchdog.other_work("going back to a checkpoint"):
                saver.conclude()
                progress = roll_back(engine, progress, log, feed)
                monitoring.restart(progress.step)
            continue
        monitoring.after_step(step, loss=agreed.loss, lr=lr, num_rounds=num_rounds, progress=progress, last=last)
        if data.validation and due(step, config.train.validate_every, last):
            with watchdog.other_work("validation"), monitoring.times.beside("validation"):
                losses = {n: validation_loss(engine, split, config, ranks) for n, split in data.validation.items()}
            monitoring.validation(step, losses)
        if config.monitor.loop_health_every and due(step, config.monitor.loop_health_every, last):
            with watchdog.other_work("loop health"):
                monitoring.loop(step, last=last)
        if config.recovery.compare_ranks_every and due(step, config.recovery.compare_ranks_every, last):
            compare_ranks(engine.module, step)
        if agreed.written:
            with monitoring.times.beside("checkpoint"):
                saver.conclude()
        ends = last or agreed.stop
        if ends or (due(step, config.checkpoint.every, last) and not progress.bad_steps.in_a_row):
            with watchdog.other_work("saving"), monitoring.times.beside("checkpoint"):
                saver.save(state_of(progress), wait=ends)
        if agreed.stop and not last:
            feed.close()
            close_log(log, out, is_main=ranks.is_main)
            return leave(step, stop, log)

    stop.obeyed()  # a request of the last moment is not one to the next run
    feed.close()
    if tokenizer:
        text = sample(engine, tokenizer, data, config, ranks)
        monitoring.dashboard.sample(progress.step, text)
        log.say(f"\nsample of {config.monitor.sample_tokens} tokens:\n{text}\n")
    close_log(log, out, is_main=ranks.is_main)
    log.say(f"done: {progress.step} steps; run folder {out}; curves: tensorboard --logdir {out / 'tensorboard'}")
    return Exit.COMPLETE, f"{progress.step} steps"


def leave(step: int, stop: StopRequests, log: RunLog) -> tuple[Exit, str]:
    """The end of a run that was asked to stop and is saved."""
    stop.obeyed()
    reason = f"stopped after step {step}: {stop.reason or 'another rank was asked to'}"
    log.say(f"{reason}; the same command goes on from here")
    return Exit.STOPPED, reason


def due(step: int, every: int, last: bool) -> bool:
    """Whether something done every `every` steps (0: only at the end) is to be done after `step` steps."""
    return last or (every > 0 and step % every == 0)


def headline(config: RunConfig, ranks: Ranks, accumulation: int, step: int, resumed: Path | None) -> str:
    """What is about to run, in two lines."""
    model, rule = config.model, config.model.rule
    start = f"going on from {resumed} at step {step}" if resumed else "starting at step 0"
    return (
        f"K = {model.num_blocks} blocks, R = {model.num_rounds} rounds, width {model.d_model}, "
        f"alpha {rule.alpha:.4g}, beta {rule.beta:.4g}, vocabulary {model.vocab_size:,}, "
        f"context {model.context_length}\n"
        f"{ranks.world_size} ranks x {accumulation} accumulation steps x {config.train.micro_batch_size} sequences on "
        f"{ranks.device.type}; {start}"
    )


def run_state(
    config: RunConfig,
    ds_config: dict[str, Any],
    data: RunData,
    ranks: Ranks,
    frozen: list[str],
    progress: Progress,
) -> checkpoint.RunState:
    """What a checkpoint of this run says, where it stands now."""
    return checkpoint.RunState(
        step=progress.step,
        samples=progress.batch * config.train.global_batch_size,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        world_size=ranks.world_size,
        zero_stage=ds_config.get("zero_optimization", {}).get("stage", 0),
        model=checkpoint.model_fields(config.model),
        alpha=config.model.rule.alpha,
        data_fingerprint=data.training.fingerprint,
        tokenizer_sha256=data.tokenizer_sha256,
        frozen=frozen,
        passed_over=progress.passed_over,
        bad_steps=progress.bad_steps.state(),
        flops=progress.flops,
    )


def sample(engine: Engine, tokenizer: Tokenizer, data: RunData, config: RunConfig, ranks: Ranks) -> str:
    monitor = config.monitor
    return sample_text(
        engine,
        config.model,
        tokenizer,
        monitor.sample_prompt,
        monitor.sample_tokens,
        data.separator_id,
        config.train.seed,
        ranks.device,
    )


if __name__ == "__main__":
    end_process(main)
