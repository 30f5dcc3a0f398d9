"""Runs at every ZeRO stage and their exported folders, for all tests of exports."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import sentencepiece
import torch

from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.training import train_sentencepiece
from pretrain.export.tokenizer_files import tokenizer_files
from tests.data_prep.test_tokenizer import TRICKY_TEXTS, write_ranks, write_tokenizer_json
from tests.support.datasets import write_dataset
from tests.support.exports import exported, load_with_transformers, train, train_on_text
from tests.support.runs import DS_CONFIGS, VOCAB
from tests.support.texts import SAMPLE_TEXTS

PROMPTS = ["def area(", "for", "    print(index)\n"]
ROUNDS = [1, 5]
MAX_TOKENS = 12
OTHER_TOKENIZERS = ["unigram", "huggingface", "gpt2", "dummy-prefix"]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("zero1_bf16", {"residual": "pre_ln", "position": "learned", "num_coda_blocks": 1}),
    "zero3": (
        "zero3_bf16",
        {"residual": {"p": 0.45}, "tie_embeddings": False, "round_embedding": True, "feed_forward": "swiglu"},
    ),
}


class Exports(NamedTuple):
    """Runs, datasets and folders by name, and what `transformers` makes of the folders."""

    runs: dict[str, Path]
    data: dict[str, Path]
    folders: dict[str, Path]
    results: dict[str, dict[str, Any]]
    tokens_BT: torch.Tensor


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Exports:
    """ZeRO-2 on text, in both precisions; ZeRO-1 tied and ZeRO-3 untied without a tokenizer. Two ranks each.

    Beside them datasets with a tokenizer of every other kind, and folders with nothing but that.
    """
    folder = tmp_path_factory.mktemp("exports")
    text = train_on_text(folder / "text")
    runs = {"text": text, "text-bf16": text}
    folders = {
        "text": exported(folder / "text-hf", text),
        "text-bf16": exported(folder / "text-bf16-hf", text, "--dtype", "bfloat16", "--rounds", "3"),
    }
    for name, (ds_config, model) in FORMS.items():
        runs[name] = train(folder / name, dataset, model, ds_config=DS_CONFIGS / f"{ds_config}.json")
        folders[name] = exported(folder / f"{name}-hf", runs[name], "--no-tokenizer")
    data = {"text": text.parent / "data", "text-bf16": text.parent / "data"}
    for name, tokenizer in other_tokenizers(folder).items():
        data[name], folders[name] = folder / f"{name}-data", folder / f"{name}-tokenizer"
        manifest = write_dataset(data[name], {"train": [np.arange(300)]}, vocab_size=tokenizer.vocab_size)
        shutil.copy(tokenizer.file, data[name])
        dataclasses.replace(manifest, tokenizer=tokenizer.record()).save(data[name])
        folders[name].mkdir()
        files = tokenizer_files(data[name], context_length=48)
        assert files is not None
        for file, content in files.files.items():
            (folders[name] / file).write_bytes(content)
    tokens_BT = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))
    requests = {"rounds": ROUNDS, "texts": TRICKY_TEXTS, "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    results = load_with_transformers(folder / "work", list(folders.values()), requests, tokens_BT)
    return Exports(runs, data, folders, {name: results[path.name] for name, path in folders.items()}, tokens_BT)


def other_tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """The last is a SentencePiece model with the trainer's usual settings: it normalises and adds a space in front."""
    (folder / "unigram.model").write_bytes(train_sentencepiece(SAMPLE_TEXTS, 335, "unigram"))
    usual = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE_TEXTS), model_writer=usual, vocab_size=75, minloglevel=2
    )
    (folder / "dummy-prefix.model").write_bytes(usual.getvalue())
    files = {
        "unigram": folder / "unigram.model",
        "huggingface": write_tokenizer_json(folder / "tokenizer.json"),
        "gpt2": write_ranks(folder / "gpt2.tiktoken"),
        "dummy-prefix": folder / "dummy-prefix.model",
    }
    return {name: load_tokenizer(file) for name, file in files.items()}
