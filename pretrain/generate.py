"""Continues prompts with the model of a checkpoint, at any number of rounds.

python -m pretrain.generate --checkpoint runs/small --prompt "def " --prompt "class "
python -m pretrain.generate --checkpoint runs/small/checkpoints/step_00000200 --prompt "import " --rounds 8 \
    --temperature 0.8 --top-p 0.95 --exit-threshold 0.01
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from deeploop_model import ModelConfigError
from deeploop_model.early_exit import EarlyExit
from deeploop_model.sampling import Sampling
from pretrain.config_file import read_yaml
from pretrain.errors import USER_ERRORS, CheckpointError
from pretrain.exit_codes import Exit
from pretrain.exported import is_exported
from pretrain.generation import continue_texts
from pretrain.weights import find_checkpoint, load_model


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error of the user's, told in one line."""
    args = parse_arguments(argv)
    try:
        sys.stdout.write(report(args))
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        return Exit.USER_ERROR
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.generate",
        description="Continue prompts with the model of a checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a checkpoint, a run folder for its newest, or an export")
    add("--prompt", action="append", required=True, help="text to continue; give it again for a batch")
    add("--data", type=Path, help="dataset folder with the tokenizer, if it is not where the run found it")
    add("--max-tokens", type=int, default=128)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")
    add("--temperature", type=float, default=1.0, help="0 takes the most likely token")
    add("--top-k", type=int, help="draw from the k most likely tokens")
    add("--top-p", type=float, default=1.0, help="draw from the most likely tokens of this total probability")
    add("--seed", type=int, default=0)
    add("--rounds", type=int, help="rounds to run; those of training by default")
    add("--kept-rounds", type=int, help="rounds with cache slots of their own; fewer are cheaper, and change the text")
    add("--exit-threshold", type=float, help="stop looping when a round changes less than this")
    add("--exit-criterion", choices=("state", "kl"), help="what is compared (default: state)")
    add("--exit-scope", choices=("token", "sequence"), help="what stops together (default: token)")
    add("--exit-floor", type=int, help="rounds that every token runs at least (default: 2)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    return parser.parse_args(argv)


def report(args: argparse.Namespace) -> str:
    """Every text, and what it took."""
    check_options(args)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    early_exit = early_exit_of(args)
    folder = find_checkpoint(args.checkpoint)
    data = dataset_of(folder, args.data)
    tokenizer = load_tokenizer(data)
    device = torch.device(args.device)
    model = load_model(folder).to(device, getattr(torch, args.dtype))
    texts, generated = continue_texts(
        model,
        model.config,
        tokenizer,
        args.prompt,
        start_id=load_manifest(data).separator_id,
        seed=args.seed,
        stop_texts=args.stop,
        max_tokens=args.max_tokens,
        sampling=sampling,
        num_rounds=args.rounds,
        kept_rounds=args.kept_rounds,
        early_exit=early_exit,
        device=device,
    )
    lines = []
    for number, text in enumerate(texts, start=1):
        lines.append(f"--- {number}: {text.num_tokens} tokens, ended by {text.ended_by}")
        lines.append(text.prompt + text.continuation)
    lines.append(f"--- {generated.mean_rounds:.2f} rounds per token, cache of {generated.cache_bytes:,} bytes")
    return "".join(line + "\n" for line in lines)


def check_options(args: argparse.Namespace) -> None:
    """Raises ModelConfigError for what the model and its sampling would not notice."""
    if args.seed < 0:
        raise ModelConfigError(f"--seed: {args.seed} must be 0 or more")
    if "" in args.stop:
        raise ModelConfigError("--stop: an empty text is found everywhere; leave the option out")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelConfigError(f"--device: {args.device!r} cannot be used: {reason}") from None


def early_exit_of(args: argparse.Namespace) -> EarlyExit | None:
    """The rule of the --exit options, or None without a threshold. Raises ModelConfigError."""
    names = ("criterion", "scope", "floor")
    given = {name: getattr(args, f"exit_{name}") for name in names if getattr(args, f"exit_{name}") is not None}
    if args.exit_threshold is not None:
        return EarlyExit(args.exit_threshold, **given)
    if given:
        raise ModelConfigError(f"--exit-{next(iter(given))}: has no effect without --exit-threshold")
    return None


def dataset_of(checkpoint: Path, data: Path | None) -> Path:
    """The dataset that the run was trained on, for its tokenizer. Raises a user error where it is not to be found."""
    if data is not None:
        return data
    if is_exported(checkpoint):
        raise CheckpointError(f"{checkpoint}: an export does not say where its dataset lies; give --data FOLDER")
    run_config = checkpoint.parent.parent / "config.yaml"
    path = read_yaml(run_config).get("data", {}).get("path")
    if isinstance(path, list):  # a mixture: all of them have one tokenizer
        path = path[0]["path"]
    if path is None or not Path(path).is_dir():
        raise CheckpointError(f"{run_config}: data.path: {path}: no such folder from here; give --data FOLDER")
    return Path(path)


if __name__ == "__main__":
    sys.exit(main())
