"""Evaluates a checkpoint on a split: loss, perplexity, bits per byte by number of rounds and by position.

python -m pretrain.evaluate --checkpoint runs/small --data data/python-stdlib --rounds 1,2,4,8
deepspeed pretrain/evaluate.py --checkpoint runs/medium --data data/mine --rounds 1,3,5 --context 1024,4096
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by path: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from typing import Any

import torch

from data_prep.durable import write_atomic
from data_prep.reader import TokenSplit, open_split
from deeploop_model import DeepLoopModel
from pretrain.errors import USER_ERRORS, ConfigError
from pretrain.evaluation import Evaluation, evaluate
from pretrain.exit_codes import Exit
from pretrain.ranks import Ranks, end_process, process_group, together
from pretrain.weights import find_checkpoint, load_model


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error of the user's, told in one line."""
    args = parse_arguments(argv)
    ranks = Ranks.from_environment()
    try:
        with process_group(ranks):
            evaluations = run(args, ranks)
        if ranks.is_main:
            print(table(evaluations))
            if args.out:
                write_atomic(args.out, (json.dumps([as_json(e) for e in evaluations], indent=1) + "\n").encode())
    except USER_ERRORS as error:
        where = f" (rank {ranks.rank})" if ranks.world_size > 1 else ""
        sys.stderr.write(f"error{where}: {error}\n")
        return Exit.USER_ERROR
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.evaluate",
        description="Loss of a checkpoint by number of rounds and by position.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a checkpoint, a run folder for its newest, or an export")
    add("--data", type=Path, required=True, help="dataset folder")
    add("--split", default="validation")
    add("--rounds", type=numbers, metavar="N,N,...", help="numbers of rounds; that of training by default")
    add("--context", type=numbers, metavar="N,N,...", help="tokens per window; the model's own by default")
    add("--windows", type=number, help="windows to use, spread evenly over the split; all by default")
    add("--batch-size", type=number, default=8, help="windows per forward pass on one rank")
    add("--separate-documents", action="store_true", help="keep attention and positions within documents")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--out", type=Path, metavar="FILE.json", help="write all figures, every position among them")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(argv)


def number(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of 1 or more")
    return int(text)


def numbers(text: str) -> list[int]:
    """Different numbers of 1 or more, ascending."""
    return sorted({number(part) for part in text.split(",")})


def run(args: argparse.Namespace, ranks: Ranks) -> list[Evaluation]:
    """One evaluation per context."""
    with together():
        split = open_split(args.data, args.split)
        model = load_model(find_checkpoint(args.checkpoint)).to(ranks.device, getattr(torch, args.dtype))
        check(model, split, args)
    own = model.config.context_length
    return [
        evaluate(
            with_context(model, context),
            split,
            args.rounds or [model.config.num_rounds],
            context=context,
            max_windows=args.windows,
            batch_size=args.batch_size,
            separate_documents=args.separate_documents,
            ranks=ranks,
        )
        for context in args.context or [own]
    ]


def check(model: DeepLoopModel, split: TokenSplit, args: argparse.Namespace) -> None:
    """Raises ConfigError where the data does not fit the model."""
    config = model.config
    if split.vocab_size > config.vocab_size:
        raise ConfigError(f"--data: {args.data} has {split.vocab_size} tokens, the model reads {config.vocab_size}")
    if config.position == "learned" and max(args.context or [1]) > config.context_length:
        raise ConfigError(
            f"--context: {max(args.context)}: learned positions end at {config.context_length}; use that or less"
        )
    if args.separate_documents and split.manifest.separator_id is None:
        raise ConfigError(f"--separate-documents: {args.data} has no token between documents")


def with_context(model: DeepLoopModel, context: int) -> DeepLoopModel:
    """The same model, which reads windows longer than those of training as well: no weight hangs on the length."""
    model.config = dataclasses.replace(model.config, context_length=max(context, model.config.context_length))
    return model


def table(evaluations: Sequence[Evaluation]) -> str:
    """All figures as text, a line per context and number of rounds, then losses by position."""
    lines = [f"{'context':>8} {'windows':>8} {'rounds':>7} {'loss':>9} {'perplexity':>11} {'bits/byte':>10}"]
    for e in evaluations:
        for row, rounds in enumerate(e.rounds):
            bits = e.bits_per_byte(row)
            lines.append(
                f"{e.context:>8} {e.windows:>8} {rounds:>7} {e.loss(row):>9.4f} {e.perplexity(row):>11.3f} "
                + (f"{bits:>10.4f}" if bits is not None else f"{'unknown':>10}")
            )
    for e in evaluations:
        lines += ["", f"loss by position, context {e.context}", f"{'rounds':>8} " + heading(e)]
        for row, rounds in enumerate(e.rounds):
            lines.append(f"{rounds:>8} " + " ".join(f"{loss:>9.4f}" for loss in e.by_position(row).values()))
    return "\n".join(lines)


def heading(evaluation: Evaluation) -> str:
    return " ".join(f"{name:>9}" for name in evaluation.by_position(0))


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """All figures as plain values."""
    return {
        "context": evaluation.context,
        "windows": evaluation.windows,
        "rounds": {
            str(rounds): {
                "loss": evaluation.loss(row),
                "perplexity": evaluation.perplexity(row),
                "bits_per_byte": evaluation.bits_per_byte(row),
                "loss_by_position": evaluation.nats_RT[row].tolist(),
            }
            for row, rounds in enumerate(evaluation.rounds)
        },
    }


if __name__ == "__main__":
    end_process(main)
