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
from contextlib import nullcontext
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run by path: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from typing import Any

from data_prep.reader import TokenSplit, open_split
from data_prep.tokenizer import Tokenizer, load_tokenizer
from deeploop_model import DeepLoopModel
from deeploop_model.flops import train_flops
from deeploop_model.visit_alignment import measured_visits
from pretrain import checkpoint
from pretrain.config import RunConfig
from pretrain.config_file import load_config
from pretrain.data_feed import TrainFeed
from pretrain.ds_config import accumulation_steps, load_ds_config
from pretrain.engine import Engine, build_engine, compile_blocks, set_learning_rate, train_step
from pretrain.errors import USER_ERRORS
from pretrain.freezing import freeze
from pretrain.generation import sample_text
from pretrain.provenance import write_resolved_config
from pretrain.ranks import Ranks, mean_over_ranks, process_group, sum_over_ranks, together
from pretrain.recompute import chosen_recompute
from pretrain.rounds import rounds_of_step
from pretrain.run_log import RunLog
from pretrain.schedule import learning_rate
from pretrain.seeding import seed_step
from pretrain.validation import validation_loss
from pretrain.weights import load_initial_weights

USER_ERROR_EXIT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when the run is complete, 2 for an error of the user's, told in one line."""
    args = parse_arguments(argv)
    ranks = Ranks.from_environment()
    try:
        config = load_config(args.config, [*args.overrides, *args.resume_override])
        ds_config = load_ds_config(args.ds_config, config, ranks.world_size)
        with process_group(ranks):
            train(config, ds_config, ranks)
    except USER_ERRORS as error:
        where = f" (rank {ranks.rank})" if ranks.world_size > 1 else ""
        sys.stderr.write(f"error{where}: {error}\n")
        return USER_ERROR_EXIT
    return 0


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


def train(config: RunConfig, ds_config: dict[str, Any], ranks: Ranks) -> None:
    """The run, from its first or last saved step to its last."""
    out, origin = Path(config.out), ""
    recompute, reason = chosen_recompute(config)
    with together():
        training_split = open_split(Path(config.data.path), "train")
        validation_split = open_split(Path(config.data.path), "validation") if config.train.validate_every else None
        tokenizer = load_tokenizer(Path(config.data.path)) if config.monitor.sample_tokens else None
        resumed = checkpoint.choose(config.checkpoint.resume, out / "checkpoints")
        saved = checkpoint.read_state(resumed) if resumed else None
        model = DeepLoopModel(config.model, seed=config.train.seed, recompute=recompute)
        if config.train.initial_weights and not saved:
            origin = "\n" + load_initial_weights(
                model, Path(config.train.initial_weights), training_split.manifest.tokenizer.sha256
            )
        frozen = freeze(model, config.train.trainable, config.train.frozen)
        state_at = partial(run_state, config, ds_config, training_split, ranks, frozen)
        if resumed and saved:
            checkpoint.check_match(resumed, saved, state_at(saved.step, saved.flops))
        if ranks.is_main:
            write_resolved_config(out, config, ds_config)

    engine = build_engine(model, config, ds_config)
    if resumed:
        checkpoint.load(engine, resumed)
    step, flops = (saved.step, saved.flops) if saved else (0, 0)
    accumulation = accumulation_steps(config, ranks.world_size)
    feed = TrainFeed(training_split, config, accumulation, ranks)
    tokens_per_step = config.train.global_batch_size * config.model.context_length
    log = RunLog(
        out,
        engine.monitor,
        first_step=step,
        steps=config.train.steps,
        tokens_per_step=tokens_per_step,
        is_main=ranks.is_main,
    )
    if reason:
        log.say(reason)
    if config.train.compile:
        log.say(compile_blocks(engine.module, ranks.device))
    log.say(headline(config, ranks, accumulation, step, resumed) + origin)

    while step < config.train.steps:
        seed_step(config.train.seed, step, ranks.rank)
        lr = learning_rate(step, config.optimizer.lr, config.train.steps, config.schedule)
        set_learning_rate(engine, lr)
        num_rounds = rounds_of_step(config.train.rounds, config.model.num_rounds, config.train.seed, step)
        measured = config.monitor.kappa_every and (step + 1) % config.monitor.kappa_every == 0
        with measured_visits(engine.module) if measured else nullcontext() as alignment:
            loss = train_step(engine, feed.micro_batches(step), num_rounds, config.train)
        step += 1
        flops += tokens_per_step * flops_per_token(config, num_rounds)
        last = step == config.train.steps
        if last or step % config.monitor.log_every == 0:
            grad_norm = float(engine.get_global_grad_norm())
            log.training(step, loss=mean_over_ranks(loss), lr=lr, grad_norm=grad_norm, rounds=num_rounds, flops=flops)
        if alignment:
            log.alignment(step, alignment.of(sum_over_ranks(alignment.squares(ranks.device))))
        if validation_split and due(step, config.train.validate_every, last):
            log.validation(step, validation_loss(engine, validation_split, config, ranks))
            log.restart_clock(step)
        if due(step, config.checkpoint.every, last):
            folder = checkpoint.save(engine, out / "checkpoints", state_at(step, flops), is_main=ranks.is_main)
            log.say(f"saved {folder}")
            log.restart_clock(step)

    if tokenizer:
        text = sample(engine, tokenizer, training_split, config, ranks)
        log.say(f"\nsample of {config.monitor.sample_tokens} tokens:\n{text}\n")
    log.say(f"done: {step} steps; run folder {out}; curves: tensorboard --logdir {out / 'tensorboard'}")
    log.close()


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
    split: TokenSplit,
    ranks: Ranks,
    frozen: list[str],
    step: int,
    flops: int,
) -> checkpoint.RunState:
    """Where this run stands after `step` steps."""
    return checkpoint.RunState(
        step=step,
        samples=step * config.train.global_batch_size,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        world_size=ranks.world_size,
        zero_stage=ds_config.get("zero_optimization", {}).get("stage", 0),
        model=checkpoint.model_fields(config.model),
        alpha=config.model.rule.alpha,
        data_fingerprint=split.manifest.fingerprint,
        tokenizer_sha256=split.manifest.tokenizer.sha256,
        frozen=frozen,
        flops=flops,
    )


def flops_per_token(config: RunConfig, num_rounds: int) -> int:
    train = config.train
    return train_flops(config.model, num_rounds, backprop_rounds=train.backprop_rounds, round_loss=train.round_loss)


def sample(engine: Engine, tokenizer: Tokenizer, split: TokenSplit, config: RunConfig, ranks: Ranks) -> str:
    monitor = config.monitor
    return sample_text(
        engine,
        config.model,
        tokenizer,
        monitor.sample_prompt,
        monitor.sample_tokens,
        split.manifest.separator_id,
        config.train.seed,
        ranks.device,
    )


if __name__ == "__main__":
    sys.exit(main())
