"""Exports a checkpoint, of any ZeRO stage and number of ranks, on one CPU.

python -m pretrain.export --checkpoint runs/small --to hf exports/small
python -m pretrain.export --checkpoint runs/small/checkpoints/step_00000200 --to safetensors small.safetensors \
    --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter

from data_prep.manifest import load_manifest
from deeploop_model import DeepLoopConfig
from pretrain.checkpoint import read_state
from pretrain.errors import USER_ERRORS, ConfigError
from pretrain.exit_codes import Exit
from pretrain.export.hf_folder import write_hf_folder
from pretrain.export.safetensors_file import write_safetensors_file
from pretrain.export.source import read_source
from pretrain.export.tokenizer_files import TokenizerFiles, tokenizer_files
from pretrain.generate import dataset_of
from pretrain.weights import find_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error of the user's, told in one line."""
    args = parse_arguments(argv)
    try:
        print(run(args))
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        return Exit.USER_ERROR
    except OSError as error:
        sys.stderr.write(f"error: {args.out}: cannot be written: {error.strerror}\n")
        return Exit.USER_ERROR
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.export",
        description="Write the model of a checkpoint for other tools.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="hf: a new folder; safetensors: a new .safetensors file")
    add("--checkpoint", type=Path, required=True, help="a checkpoint, or a run folder for its newest")
    add("--to", choices=("hf", "safetensors"), required=True)
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--data", type=Path, help="hf: dataset folder with the tokenizer, if it is not where the run found it")
    add("--no-tokenizer", action="store_true", help="hf: leave the tokenizer out")
    add("--rounds", type=int, help="hf: rounds that the model runs unless told otherwise; those of training by default")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> str:
    """Writes the export; one line that says what."""
    check(args)
    if args.to == "safetensors":
        source = read_source(args.checkpoint, getattr(torch, args.dtype))
        write_safetensors_file(source, args.out)
        return f"{args.out}: weights of {source.folder}, {args.dtype}"
    tokenizer = tokenizer_of(args)
    source = read_source(args.checkpoint, getattr(torch, args.dtype))
    write_hf_folder(source, tokenizer, args.out, args.rounds)
    without = "" if tokenizer else ", without a tokenizer"
    return f"{args.out}: model of {source.folder}, {args.dtype}{without}"


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that cannot be followed."""
    if args.out.exists():
        raise ConfigError(f"{args.out}: exists; give another name, or remove it first")
    if not args.out.absolute().parent.is_dir():
        raise ConfigError(f"{args.out}: no such folder as {args.out.parent}; make it first")
    if args.to == "safetensors":
        if args.out.suffix != ".safetensors":
            raise ConfigError(f"{args.out}: the name of a safetensors file must end in .safetensors")
        for option in ("data", "no_tokenizer", "rounds"):
            if getattr(args, option):
                raise ConfigError(f"--{option.replace('_', '-')}: has no effect with --to safetensors")
    if args.rounds is not None and args.rounds < 1:
        raise ConfigError(f"--rounds: {args.rounds} must be 1 or more")
    if args.data and args.no_tokenizer:
        raise ConfigError("--no-tokenizer: contradicts --data")


def tokenizer_of(args: argparse.Namespace) -> TokenizerFiles | None:
    """That of the run's dataset, or of --data. Raises a user error where it is not to be found."""
    if args.no_tokenizer:
        return None
    folder = find_checkpoint(args.checkpoint)
    state, data = read_state(folder), dataset_of(folder, args.data)
    if load_manifest(data).tokenizer.sha256 != state.tokenizer_sha256:
        raise ConfigError(f"{data}: its tokenizer is not that of the run; give --data FOLDER or --no-tokenizer")
    return tokenizer_files(data, TypeAdapter(DeepLoopConfig).validate_python(state.model).context_length)


if __name__ == "__main__":
    sys.exit(main())
