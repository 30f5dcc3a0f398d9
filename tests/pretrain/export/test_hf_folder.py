"""Exported folders as `transformers` loads them where this project is not installed, against our own model."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from deeploop_model import DeepLoopModel
from pretrain.checkpoint import read_state
from pretrain.weights import find_checkpoint, load_model
from tests.data_prep.test_tokenizer import TRICKY_TEXTS
from tests.pretrain.export.conftest import FORMS, MAX_TOKENS, OTHER_TOKENIZERS, PROMPTS, ROUNDS, Exports
from tests.support.runs import metrics

NAMES = ["text", "text-bf16", *FORMS]


def own_model(exports: Exports, name: str) -> DeepLoopModel:
    """The model of the checkpoint, in the precision of the export."""
    return load_model(find_checkpoint(exports.runs[name])).to(exports.results[name]["dtype"])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_equal_ours_at_any_number_of_rounds(name: str, exports: Exports) -> None:
    model, found, tokens_BT = own_model(exports, name), exports.results[name], exports.tokens_BT
    assert found["dtype"] == (torch.bfloat16 if name == "text-bf16" else torch.float32)
    default = 3 if name == "text-bf16" else 2
    expected = model(tokens_BT, num_rounds=default).logits
    torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-6)
    nats = F.cross_entropy(expected[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
    torch.testing.assert_close(found["loss"], nats, rtol=0, atol=1e-5)
    for rounds in ROUNDS:
        logits = model(tokens_BT, num_rounds=rounds).logits
        torch.testing.assert_close(found["logits_by_rounds"][rounds], logits, rtol=0, atol=1e-6)
        assert (logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(
        found["logits_loaded_with_rounds"], found["logits_by_rounds"][ROUNDS[-1]], rtol=0, atol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_masters_and_tied_ones_are_stored_once(name: str, exports: Exports) -> None:
    stored = load_file(exports.folders[name] / "model.safetensors")
    weights = own_model(exports, name).state_dict()
    assert stored.keys() == {f"model.{key}" for key in weights}
    assert ("model.head.weight" in stored) == (name == "zero3")
    for key, weight in weights.items():
        assert stored[f"model.{key}"].dtype == weight.dtype
        assert torch.equal(stored[f"model.{key}"], weight), key


@pytest.mark.parametrize("name", ["text", "text-bf16", *OTHER_TOKENIZERS])
def test_ids_are_those_of_training_and_text_comes_back(name: str, exports: Exports) -> None:
    found, data = exports.results[name], exports.data[name]
    tokenizer, separator = load_tokenizer(data), load_manifest(data).separator_id
    expected = [tokenizer.encode(text) for text in TRICKY_TEXTS]
    assert found["ids"] == expected
    assert found["ids_with_separator"] == [[separator, *ids] for ids in expected]
    assert found["special"] == [separator, tokenizer.eos_id, tokenizer.eos_id]
    texts = [tokenizer.decode(ids) for ids in expected]
    assert (texts == TRICKY_TEXTS) == (name != "dummy-prefix")
    assert found["decoded"] == texts
    end = "<|endoftext|>" if name in ("huggingface", "gpt2") else "</s>"
    assert found["decoded_with_separator"] == [end + text for text in texts]


def greedy(model: DeepLoopModel, prompt: list[int], rounds: int, eos_id: int) -> list[int]:
    """Full forward passes over one prompt alone; end of text is never chosen."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([tokens]), num_rounds=rounds).logits[0, -1]
        logits[eos_id] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_generate_with_left_padding_equals_full_passes_over_each_prompt(exports: Exports) -> None:
    found, model = exports.results["text"], own_model(exports, "text")
    data = exports.data["text"]
    tokenizer, separator = load_tokenizer(data), load_manifest(data).separator_id
    assert separator is not None
    prompts = [[separator, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(lengths)) > 1
    assert found["inputs"]["attention_mask"].tolist() == [[0] * (max(lengths) - n) + [1] * n for n in lengths]
    for rounds in ROUNDS:
        expected = [greedy(model, prompt, rounds, tokenizer.eos_id) for prompt in prompts]
        assert found["generated"][rounds].tolist() == expected
        assert len({token for row in expected for token in row}) > 2
    # The cache holds what was read: after the prompts one token per row and step.
    assert found["shapes"] == [(3, max(lengths)), *[(3, 1)] * (MAX_TOKENS - 1)] * len(ROUNDS)


@pytest.mark.parametrize("name", ["text", "text-bf16"])
def test_cache_beams_and_saving_again_change_nothing(name: str, exports: Exports) -> None:
    found = exports.results[name]
    if name == "text":  # bf16 rounds a cached and a full pass differently
        assert found["greedy True"].tolist() == found["greedy False"].tolist()
        assert found["beams True"].tolist() == found["beams False"].tolist()
        assert found["beams True"].tolist() != found["greedy True"].tolist()
    assert torch.equal(found["logits_saved_again"], found["logits_before_saving"])
    assert found["ids_saved_again"] == found["ids_with_separator"]


def test_config_and_card_tell_the_training(exports: Exports) -> None:
    config = exports.results["text"]["config"]
    state = read_state(find_checkpoint(exports.runs["text"]))
    assert {key: config[key] for key in state.model} == state.model
    assert (config["rounds"], exports.results["text-bf16"]["config"]["rounds"]) == (2, 3)
    facts = json.loads((exports.folders["text"] / "config.json").read_text())["deeploop_training"]
    assert (facts["step"], facts["tokens"], facts["alpha"]) == (12, 12 * 8 * 48, state.alpha)
    assert facts["data_fingerprint"] == state.data_fingerprint
    lines = metrics(exports.runs["text"])
    assert facts["loss"] == [line["loss"] for line in lines if "loss" in line][-1]
    assert facts["val_loss"] == [line["val_loss"] for line in lines if "val_loss" in line][-1]
    card = (exports.folders["text"] / "README.md").read_text()
    for row in (
        "| rounds in training | R = 2; unrolled depth N = 5 |",
        "| residual rule | deeploop |",
        f"| alpha | {state.alpha:.6g}, of the training depth |",
        "| training tokens | 4,608 |",
        f"| last validation loss | {facts['val_loss']:.4f} nats per token |",
        f"| data fingerprint | `{state.data_fingerprint}` |",
    ):
        assert row in card
    assert "The folder holds no tokenizer" in (exports.folders["zero1"] / "README.md").read_text()
