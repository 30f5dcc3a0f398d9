"""What DeepSpeed's engine costs: its training step against the same model in a bare loop that does the same work.

    python -m benchmarks.engine_step
    python -m benchmarks.engine_step --blocks 0 --sequences 8 --context 1024 --ds_config ds_configs/zero2_bf16.json

One rank. The bare loop holds bf16 weights and float32 masters as the engine does: backward pass, gradients to float32,
their global norm, clipping, the same AdamW on the masters, masters to bf16. Both take turns within each repetition.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from deeploop_model import DeepLoopModel, preset
from pretrain.config import DataConfig, RunConfig, TrainConfig
from pretrain.data_feed import Batch
from pretrain.ds_config import load_ds_config
from pretrain.engine import build_engine, build_optimizer, parameter_groups, train_step
from pretrain.ranks import Ranks, process_group


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    fields = {"num_rounds": args.rounds, "context_length": args.context, "vocab_size": args.vocab_size}
    model = preset(args.preset, **fields, **({"num_blocks": args.blocks} if args.blocks else {}))
    train = TrainConfig(
        steps=1000, global_batch_size=args.sequences, micro_batch_size=args.sequences, recompute=args.recompute
    )
    ranks = Ranks.from_environment()
    with process_group(ranks), TemporaryDirectory() as out:
        config = RunConfig(out=out, data=DataConfig(""), train=train, model=model)
        ds_config = load_ds_config(args.ds_config, config, 1)
        engine = build_engine(DeepLoopModel(model, recompute=args.recompute), config, ds_config)
        tokens = torch.randint(0, args.vocab_size, (args.sequences, args.context), device=ranks.device)
        batch = Batch(tokens, tokens, None)
        bare = bare_step(DeepLoopModel(model, recompute=args.recompute).to(ranks.device), config, batch)
        times = take_turns([bare, lambda: train_step(engine, [batch], args.rounds, train)], args.repetitions)
    bare_s, engine_s = (statistics.median(seconds) for seconds in times)
    ratios = [e / b for b, e in zip(*times, strict=True)]
    print(
        f"{platform.machine()}, {ranks.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"{args.preset}, K = {model.num_blocks}, R = {args.rounds}, {args.sequences} x {args.context} tokens\n"
        f"bare loop {1e3 * bare_s:.0f} ms, engine {1e3 * engine_s:.0f} ms: engine/bare {statistics.median(ratios):.3f} "
        f"(median of {len(ratios)} pairs; {min(ratios):.3f} to {max(ratios):.3f})"
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DeepSpeed's engine against a bare loop.")
    parser.add_argument("--preset", default="gpt2-small")
    parser.add_argument("--blocks", type=int, default=2, help="K; 0 for the preset's")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--ds_config", type=Path, default=Path("ds_configs/zero2_bf16_cpu.json"))
    return parser.parse_args(argv)


def bare_step(model: DeepLoopModel, config: RunConfig, batch: Batch) -> Callable[[], object]:
    groups = parameter_groups(model, config.optimizer.weight_decay)
    masters = [parameter.detach().clone() for group in groups for parameter in group["params"]]
    weights = [parameter for group in groups for parameter in group["params"]]
    of = {id(weight): master for weight, master in zip(weights, masters, strict=True)}
    model.bfloat16()
    optimizer = build_optimizer(
        [{**group, "params": [of[id(p)] for p in group["params"]]} for group in groups], config.optimizer
    )

    def step() -> None:
        loss = model(batch.tokens_BT, batch.targets_BT, round_loss=config.train.round_loss).loss
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, config.optimizer.gradient_clipping)
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.detach().copy_(master)
            master.grad = None

    return step


def take_turns(steps: Sequence[Callable[[], object]], repetitions: int) -> list[list[float]]:
    """Seconds of each; the first turn warms up."""
    times: list[list[float]] = [[] for _ in steps]
    for repetition in range(repetitions + 1):
        for step, seconds in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repetition:
                seconds.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
