"""The command line: `python -m data_prep COMMAND ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep import commands
from data_prep.combine import FOREIGN
from data_prep.errors import DataError
from data_prep.sources import stdlib
from data_prep.sources.corpus import PIECE_BYTES, SHARD_BYTES
from data_prep.tokenizer_tiktoken import ENCODINGS


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("corpus (one of --source, --input, --hf)")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--source", choices=[stdlib.NAME], help="an embedded corpus")
    which.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help=".txt .jsonl .json .parquet, each also .gz or .zst; files, folders, quoted globs",
    )
    which.add_argument("--hf", metavar="NAME", help="a Hugging Face dataset, or a folder made by save_to_disk")
    group.add_argument("--hf-config", metavar="NAME")
    group.add_argument("--hf-split", metavar="NAME", default="train")
    group.add_argument("--hf-streaming", action="store_true", help="read it over the network instead of the cache")
    group.add_argument(
        "--text-unit", choices=["file", "line", "block"], default="file", help="what is one document in a .txt"
    )
    group.add_argument("--text-field", default="text", metavar="FIELD")
    group.add_argument("--id-field", metavar="FIELD", help="named in the report of rejected records")
    group.add_argument(
        "--max-record-bytes", type=_positive, default=1 << 26, help="longer lines are streamed, not held (64 MiB)"
    )
    group.add_argument("--min-chars", type=int, default=0)
    group.add_argument("--max-chars", type=_positive)
    group.add_argument("--filter", metavar="FILE.py:FUNCTION", help="called as function(text, fields); true keeps")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", type=Path, required=True, help=".model, tokenizer.json or .tiktoken")
    parser.add_argument(
        "--eos", metavar="TOKEN", help="the token that ends a document, where tokenizer.json is unclear"
    )
    parser.add_argument("--tiktoken-encoding", choices=list(ENCODINGS), help="where the rank file's name does not say")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_prep", description=__doc__)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    subparsers = parser.add_subparsers(dest="command", required=True)

    train = subparsers.add_parser("train-tokenizer", help="train a SentencePiece model on a corpus")
    _add_corpus(train)
    train.add_argument("--vocab-size", type=_positive, required=True)
    train.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe")
    train.add_argument(
        "--train-bytes", type=_positive, default=100_000_000, help="of text, drawn evenly by hash (100 MB)"
    )
    train.add_argument("--out", type=Path, required=True, help="the .model file to write")
    train.set_defaults(run=commands.train_tokenizer)

    tokenize = subparsers.add_parser("tokenize", help="turn a corpus into a dataset folder")
    _add_corpus(tokenize)
    _add_tokenizer(tokenize)
    tokenize.add_argument("--backend", choices=["reference", "gigatoken"], default="reference")
    tokenize.add_argument("--out", type=Path, required=True, help="the dataset folder")
    tokenize.add_argument("--name", help="beginning of the shards' names; the source's or the folder's name otherwise")
    tokenize.add_argument("--validation-fraction", type=_fraction, default=0.05, help="of documents (0.05)")
    tokenize.add_argument("--add-bos", action="store_true", help="begin each document with the BOS token")
    tokenize.add_argument("--deduplicate", action="store_true", help="keep the first of documents with the same text")
    tokenize.add_argument("--strict", action="store_true", help="stop at the first bad record instead of counting it")
    tokenize.add_argument("--workers", type=_positive, help="processes; all cores otherwise")
    tokenize.add_argument("--shard-bytes", type=_positive, default=SHARD_BYTES, help="of input per shard (256 MiB)")
    tokenize.add_argument("--piece-bytes", type=_positive, default=PIECE_BYTES, help="of input per task (2 MiB)")
    tokenize.set_defaults(run=commands.tokenize)
    _add_folder_commands(subparsers)
    return parser


def _add_folder_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = subparsers.add_parser("verify", help="check every checksum, index, token and count of a dataset")
    verify.add_argument("folder", type=Path)
    verify.set_defaults(run=commands.verify)

    inspect = subparsers.add_parser("inspect", help="show what a dataset holds, and documents as text")
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--split", default="train")
    inspect.add_argument("--document", type=int, default=0, help="number of the first one shown, from 0")
    inspect.add_argument("--count", type=int, default=1)
    inspect.set_defaults(run=commands.inspect)

    merge = subparsers.add_parser("merge", help="join datasets of one tokenizer")
    merge.add_argument("folders", type=Path, nargs="+")
    merge.add_argument("--out", type=Path, required=True)
    merge.add_argument("--name", help="beginning of the shards' names; the folder's name otherwise")
    merge.set_defaults(run=commands.merge)

    convert = subparsers.add_parser("convert", help="to or from nanoGPT's and llm.c's .bin files")
    which = convert.add_mutually_exclusive_group(required=True)
    which.add_argument("--to", choices=FOREIGN, help="write --dataset in this format")
    which.add_argument("--from", dest="source_format", choices=FOREIGN, help="make a dataset of --train, --validation")
    convert.add_argument("--dataset", type=Path)
    convert.add_argument("--train", type=Path, nargs="+", default=[])
    convert.add_argument("--validation", type=Path, nargs="+", default=[])
    convert.add_argument("--vocab-size", type=_positive)
    convert.add_argument("--eos-id", type=int)
    convert.add_argument("--out", type=Path, required=True)
    convert.set_defaults(run=commands.convert)

    adopt = subparsers.add_parser("adopt", help="write a manifest beside Megatron pairs made elsewhere")
    adopt.add_argument("folder", type=Path, help="where the pairs lie")
    adopt.add_argument("--train", nargs="+", default=[], metavar="PREFIX", help="paths inside, without .bin")
    adopt.add_argument("--validation", nargs="+", default=[], metavar="PREFIX")
    adopt.add_argument("--tokenizer", type=Path)
    adopt.add_argument("--vocab-size", type=_positive)
    adopt.add_argument("--eos-id", type=int)
    adopt.set_defaults(run=commands.adopt)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; an error the user can put right is one line on standard error and exit status 2."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0
