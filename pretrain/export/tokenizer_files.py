"""A dataset's tokenizer as files that `AutoTokenizer` loads, giving the ids of training.

A `tokenizer.json` stays one, without truncation and padding. SentencePiece and tiktoken files stay what they are too,
behind a small class that runs their own library: see `pretrain.export.remote.tokenization_base` for why.
In all cases text never becomes a special token, and a text begins after the separator of documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer_tiktoken import ENCODINGS, TiktokenTokenizer
from pretrain.errors import CheckpointError
from pretrain.export.code import source_files

REMOTE = "pretrain.export.remote"


@dataclass(frozen=True)
class TokenizerFiles:
    """What goes into the folder."""

    files: dict[str, bytes]
    separator_id: int
    """The token before every document and before a prompt."""
    eos_id: int


def tokenizer_files(data: Path, context_length: int) -> TokenizerFiles | None:
    """Files for the tokenizer of a dataset folder; None where the dataset was adopted without one.

    Raises DataError for a folder that is no dataset, CheckpointError for a tokenizer that cannot be exported.
    """
    manifest = load_manifest(data)
    record = manifest.tokenizer
    if record.file is None or record.eos_id is None:
        return None
    separator_id = manifest.separator_id
    if separator_id is None:
        raise CheckpointError(f"{data}: no token stands between its documents; use --no-tokenizer")
    file = data / record.file
    config: dict[str, Any] = {
        "model_max_length": context_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if record.kind == "huggingface":
        content = file_content(file)
        spellings = {id_: spelling for spelling, id_ in vocabulary(content).items()}
        separator = spellings[separator_id]
        files = {"tokenizer.json": as_json(plain_pipeline(content, separator, separator_id))}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        eos = spellings[record.eos_id]
    elif record.kind == "sentencepiece":
        import sentencepiece

        files = {"tokenizer.model": file.read_bytes(), **code("tokenization_sentencepiece")}
        config |= auto_class("tokenization_sentencepiece", "DeepLoopSentencePieceTokenizer")
        piece = sentencepiece.SentencePieceProcessor(model_file=str(file)).id_to_piece
        separator, eos = piece(separator_id), piece(record.eos_id)
    elif record.kind == "tiktoken":
        tokenizer = load_tokenizer(data)
        assert isinstance(tokenizer, TiktokenTokenizer)
        files = {"tokenizer.tiktoken": file.read_bytes(), **code("tokenization_tiktoken")}
        config |= auto_class("tokenization_tiktoken", "DeepLoopTiktokenTokenizer")
        config |= {"pattern": ENCODINGS[tokenizer.encoding].pattern, "end_of_text_id": record.eos_id}
        separator = eos = "<|endoftext|>"
    else:
        raise CheckpointError(f"{data}: a tokenizer of kind {record.kind!r} cannot be exported; use --no-tokenizer")
    config |= {"bos_token": separator, "eos_token": eos, "pad_token": eos}
    return TokenizerFiles(files | {"tokenizer_config.json": as_json(config)}, separator_id, record.eos_id)


def plain_pipeline(content: dict[str, Any], separator: str, separator_id: int) -> dict[str, Any]:
    """A tokenizer.json that neither cuts nor pads, and puts nothing but the separator before a text."""
    begin = {"SpecialToken": {"id": separator, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    processor = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {separator: {"id": separator, "ids": [separator_id], "tokens": [separator]}},
    }
    return content | {"truncation": None, "padding": None, "post_processor": processor}


def vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Spelling -> id of a tokenizer.json's added tokens, which the special ones are among."""
    return {token["content"]: token["id"] for token in content["added_tokens"]}


def file_content(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes())  # type: ignore[no-any-return]


def code(module: str) -> dict[str, bytes]:
    return {name: source.encode() for name, source in source_files(f"{REMOTE}.{module}").items()}


def auto_class(module: str, name: str) -> dict[str, Any]:
    return {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [f"{module}.{name}", None]}}


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
