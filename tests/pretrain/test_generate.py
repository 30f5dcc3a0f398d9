"""The generation command on a real checkpoint: its text, rounds and cache against full forward passes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.manifest import load_manifest
from data_prep.tokenizer import Tokenizer, load_tokenizer
from pretrain.generate import main
from pretrain.weights import find_checkpoint, load_model
from tests.support.datasets import write_text_dataset
from tests.support.ranks import run_ranks
from tests.support.runs import run_main, small_tree, write_tree

PROMPTS = ["def area(", "for"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on text, by two ranks; the dataset lies beside it."""
    folder = tmp_path_factory.mktemp("text")
    write_text_dataset(folder / "data")
    tree = small_tree(folder / "out", folder / "data", steps=12, validate_every=0)
    tree["model"] |= {"context_length": 32, "num_prelude_blocks": 1, "num_kv_heads": 1}
    config = write_tree(folder / "run.yaml", tree)
    assert [r.value for r in run_ranks(2, run_main, config, folder=folder)] == [0, 0]
    return folder / "out"


def generated(capsys: pytest.CaptureFixture[str], run_folder: Path, *options: str) -> list[str]:
    """Lines that the command prints for `PROMPTS`, with temperature 0 unless told otherwise."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    assert main(["--checkpoint", str(run_folder), *prompts, "--temperature", "0", *options]) == 0
    return capsys.readouterr().out.splitlines()


def by_full_passes(run_folder: Path, prompt: str, count: int, rounds: int) -> str:
    model, tokenizer = load_model(find_checkpoint(run_folder)), load_tokenizer(run_folder.parent / "data")
    tokens = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    length = len(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), num_rounds=rounds).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_id:
            break
    return prompt + tokenizer.decode([token for token in tokens[length:] if token != tokenizer.eos_id])


@pytest.mark.parametrize("rounds", [2, 5])
def test_text_equals_that_of_full_passes_at_any_number_of_rounds(
    rounds: int, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = generated(capsys, run_folder, "--max-tokens", "9", "--rounds", str(rounds))
    expected = [by_full_passes(run_folder, prompt, 9, rounds) for prompt in PROMPTS]
    text = "\n".join(lines)
    for number, continuation in enumerate(expected, start=1):
        assert f"--- {number}: 9 tokens, ended by max_tokens\n{continuation}\n--- " in text
    columns = 1 + longest_prompt(run_folder) + 9 + 1
    cache = 2 * 2 * (1 + 2 * rounds) * 16 * columns * 4  # keys and values, prompts, visits, one head, float32
    assert lines[-1] == f"--- {rounds}.00 rounds per token, cache of {cache:,} bytes"


def longest_prompt(run_folder: Path) -> int:
    tokenizer: Tokenizer = load_tokenizer(run_folder.parent / "data")
    return max(len(tokenizer.encode(prompt)) for prompt in PROMPTS)


def test_early_exit_and_kept_rounds(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = generated(capsys, run_folder, "--max-tokens", "6", "--rounds", "6")
    never = generated(capsys, run_folder, "--max-tokens", "6", "--rounds", "6", "--exit-threshold", "0")
    assert never == full
    at_once = generated(
        capsys, run_folder, "--max-tokens", "6", "--rounds", "6", "--exit-threshold", "1e9", "--exit-floor", "3"
    )
    assert at_once[-1].startswith("--- 3.00 rounds per token")
    two_slots = generated(capsys, run_folder, "--max-tokens", "6", "--rounds", "6", "--kept-rounds", "2")
    sizes = [int(lines[-1].split()[-2].replace(",", "")) for lines in (two_slots, full)]
    assert sizes[0] * (1 + 2 * 6) == sizes[1] * (1 + 2 * 2)


def test_draws_repeat_by_seed_and_end_before_a_stop_text(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--max-tokens", "12"]
    first, again, other = (generated(capsys, run_folder, *drawn, "--seed", seed) for seed in ("3", "3", "4"))
    assert first == again
    assert first != other
    free = by_full_passes(run_folder, PROMPTS[0], 9, 2)
    stop = free[len(PROMPTS[0]) + 2 :][:3]
    stopped = generated(capsys, run_folder, "--max-tokens", "9", "--stop", stop)
    start = stopped.index(next(line for line in stopped if line.startswith("--- 1:")))
    assert stopped[start].endswith("ended by stop")
    assert "\n".join(stopped[start + 1 :]).startswith(free[: free.index(stop, len(PROMPTS[0]))] + "\n--- 2:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere: no such folder; give a run folder or a checkpoint"),
        (["--rounds", "0"], "num_rounds: 0 must be 1 or more"),
        (["--prompt", "x" * 99], "prompt 2: 100 tokens; the model continues 1 to 31"),
        (["--top-p", "0"], "top_p: 0.0 must be more than 0 and at most 1"),
        (["--kept-rounds", "3"], "kept_rounds: 3 must be from 1 to the 2 rounds that run"),
        (["--exit-threshold", "-1"], "exit threshold: -1.0 must be 0 or more"),
        (["--exit-threshold", "0.1", "--exit-floor", "1"], "exit floor: 1 must be 2 or more"),
        (["--exit-floor", "3"], "--exit-floor: has no effect without --exit-threshold"),
        (["--data", "nowhere"], "nowhere"),
        (["--seed", "-1"], "--seed: -1 must be 0 or more"),
        (["--stop", ""], "--stop: an empty text is found everywhere"),
        (["--device", "abacus"], "--device: 'abacus' cannot be used: "),
        (["--device", "cuda:99"], "--device: 'cuda:99' cannot be used: "),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--checkpoint", str(run_folder), "--prompt", "for", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]  # after DeepSpeed's progress in loading
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in captured.err


def test_a_run_without_its_dataset_asks_for_one(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run_folder, moved)
    text = (moved / "config.yaml").read_text().replace(str(run_folder.parent / "data"), "somewhere/else")
    (moved / "config.yaml").write_text(text)
    arguments: list[Any] = ["--checkpoint", str(moved), "--prompt", "for", "--max-tokens", "2"]
    assert main(arguments) == 2
    assert "data.path: somewhere/else: no such folder from here; give --data FOLDER" in capsys.readouterr().err
    assert main([*arguments, "--data", str(run_folder.parent / "data")]) == 0


def test_a_prompt_follows_the_token_that_documents_follow_in_training(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With documents that begin with BOS, another token stands before the prompt than with EOS between them."""
    shutil.copytree(run_folder.parent / "data", tmp_path / "data")
    manifest = load_manifest(tmp_path / "data")
    assert manifest.separator_id == manifest.tokenizer.eos_id
    dataclasses.replace(manifest, document_rule="bos text eos").save(tmp_path / "data")
    model, tokenizer = load_model(find_checkpoint(run_folder)), load_tokenizer(tmp_path / "data")
    assert manifest.tokenizer.bos_id not in (None, manifest.tokenizer.eos_id)
    tokens = [manifest.tokenizer.bos_id, *tokenizer.encode("for")]
    expected = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
    options = ["--prompt", "for", "--data", str(tmp_path / "data"), "--max-tokens", "1", "--temperature", "0"]
    assert main(["--checkpoint", str(run_folder), *options]) == 0
    assert f"\nfor{tokenizer.decode([expected])}\n" in capsys.readouterr().out
