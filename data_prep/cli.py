"""The command line: `python -m data_prep COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from data_prep import build, training
from data_prep.errors import DataError
from data_prep.sources import stdlib
from data_prep.tokenizer import load_tokenizer


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train-tokenizer", help="train a SentencePiece model on a corpus")
    train.add_argument("--source", required=True, choices=[stdlib.NAME])
    train.add_argument("--vocab-size", type=int, required=True)
    train.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe")
    train.add_argument("--out", type=Path, required=True, help="the .model file to write")
    train.set_defaults(run=_train_tokenizer)

    tokenize = commands.add_parser("tokenize", help="turn a corpus into a dataset folder")
    tokenize.add_argument("--source", required=True, choices=[stdlib.NAME])
    tokenize.add_argument("--tokenizer", type=Path, required=True)
    tokenize.add_argument("--out", type=Path, required=True, help="the dataset folder")
    tokenize.add_argument("--validation-fraction", type=_fraction, default=0.05)
    tokenize.set_defaults(run=_tokenize)
    return parser


def _train_tokenizer(arguments: argparse.Namespace) -> None:
    root = stdlib.stdlib_root()
    files = stdlib.stdlib_files(root)
    settings: dict[str, Any] = {
        "source": arguments.source,
        "inputs": build.fingerprint(root, files).fingerprint,
        "vocab_size": arguments.vocab_size,
        "model_type": arguments.model_type,
    }
    if training.is_finished(arguments.out, settings):
        print(f"{arguments.out}: already trained with these settings")
        return
    texts = build.documents(files, {})
    model = training.train_sentencepiece(texts, arguments.vocab_size, arguments.model_type)
    training.save_trained(arguments.out, model, settings)
    print(f"{arguments.out}: {arguments.vocab_size} pieces ({arguments.model_type})")


def _tokenize(arguments: argparse.Namespace) -> None:
    root = stdlib.stdlib_root()
    files = stdlib.stdlib_files(root)
    inputs = build.fingerprint(root, files)
    tokenizer = load_tokenizer(arguments.tokenizer)
    settings: dict[str, Any] = {
        "source": arguments.source,
        "validation_fraction": arguments.validation_fraction,
    }
    command = (
        f"python -m data_prep tokenize --source {arguments.source} "
        f"--validation-fraction {arguments.validation_fraction}"
    )
    if build.is_finished(arguments.out, inputs, settings, tokenizer.record().sha256):
        print(f"{arguments.out}: already finished with these inputs and settings")
        return
    manifest = build.tokenize(
        files,
        inputs,
        tokenizer,
        arguments.tokenizer,
        arguments.out,
        arguments.source,
        arguments.validation_fraction,
        settings,
        command,
    )
    for name, split in manifest.splits.items():
        print(f"{name}: {split.tokens:,} tokens, {split.documents:,} documents, {split.text_bytes:,} bytes")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; an error the user can put right is one line on standard error and exit status 2."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
