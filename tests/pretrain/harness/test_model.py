"""Tasks with known answers in lm-evaluation-harness: our model, and exported folders under its own `hf`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from lm_eval.tasks import TaskManager

from data_prep.manifest import load_manifest
from data_prep.tokenizer import Tokenizer, load_tokenizer
from deeploop_model import DeepLoopModel
from pretrain.errors import CheckpointError, ConfigError
from pretrain.harness.__main__ import TASKS
from pretrain.harness.model import DeepLoopLM
from pretrain.weights import find_checkpoint, load_model
from tests.support.exports import exported, train_on_text
from tests.support.runs import REPOSITORY

CONTEXT = 48
ROUNDS = 3
TEXTS = ["def area(width):\n    return width\n" * 10, "for index in range(10):\n"]
PROMPTS = ["def area(", "for index in", "    print(in"]
STOP = "("
CHOICES: list[tuple[str, str, str]] = [
    ("def area(", "width", "index"),
    ("for ", "index in range", "width"),
    ("    ", "return", "print(index)"),
]
PAPER = {"arc_easy", "arc_challenge", "openbookqa", "boolq", "hellaswag", "piqa", "winogrande", "sciq"}


class Harness(NamedTuple):
    """A run, and what the harness said of it."""

    run: Path
    statuses: list[int]
    written: dict[str, Any]
    """The results file of the command."""
    answers: dict[str, Any]
    """By model: results, and responses by task in the order of the documents."""
    errors: str = ""

    @property
    def model(self) -> DeepLoopModel:
        return load_model(find_checkpoint(self.run))

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.run.parent / "data")

    def tokens(self, text: str) -> list[int]:
        separator = load_manifest(self.run.parent / "data").separator_id
        assert separator is not None
        return [separator, *self.tokenizer.encode(text)]


def log_probabilities(model: DeepLoopModel, tokens: list[int]) -> torch.Tensor:
    """[T - 1] nats of each token after the first, by one plain forward pass."""
    log_p_TV: torch.Tensor = model(torch.tensor([tokens[:-1]]), num_rounds=ROUNDS).logits[0].log_softmax(-1)
    return log_p_TV[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


def choice(harness: Harness, model: DeepLoopModel, context: str, continuation: str) -> float:
    """Nats of a continuation, and of the spaces before it, which the harness counts to it."""
    count = len(harness.tokens(context.rstrip())) - 1
    return float(log_probabilities(model, harness.tokens(context + continuation))[count:].sum())


def write_tasks(folder: Path, answers: list[int]) -> None:
    """Three tasks on local documents."""
    documents: dict[str, list[dict[str, Any]]] = {
        "choice": [
            {"text": context, "choices": [first, second], "answer": answer}
            for (context, first, second), answer in zip(CHOICES, answers, strict=True)
        ],
        "rolling": [{"text": text} for text in TEXTS],
        "continue": [{"text": prompt, "answer": ""} for prompt in PROMPTS],
    }
    options: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "continue": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [STOP], "max_gen_toks": 10, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, own in options.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "target_delimiter": "",
            "num_fewshot": 0,
            **own,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """All in one process without a hub; the first two answers are the likelier ones, the third is not."""
    work = tmp_path_factory.mktemp("harness")
    run = train_on_text(work / "text")
    folder = exported(work / "text-hf", run, "--rounds", str(ROUNDS))
    plain = Harness(run, [], {}, {})
    likelier = [
        int(choice(plain, plain.model, context, second) > choice(plain, plain.model, context, first))
        for context, first, second in CHOICES
    ]
    write_tasks(work, [likelier[0], likelier[1], 1 - likelier[2]])
    ours, hf = f"rounds={ROUNDS},checkpoint=", f"pretrained={folder},trust_remote_code=True,dtype=float32"
    everything = ["local_choice", "local_rolling", "local_continue"]
    models = {
        "run": ("deeploop", f"{ours}{run}", 2, everything),
        "run-alone": ("deeploop", f"{ours}{run}", 1, everything),
        "export": ("deeploop", f"{ours}{folder},data={run.parent / 'data'}", 3, everything),
        "hf": ("hf", hf, 2, everything),
        "hf-no-bos": ("hf", f"{hf},add_bos_token=False", 2, ["local_rolling"]),
    }
    names = ("model", "model_args", "batch_size", "tasks")
    common = ["--model", "deeploop", "--tasks", "local_choice", "--include_path", str(work), "--model_args"]
    output = ["--output_path", str(work / "output"), "--batch_size", "2", "--device", "cpu"]
    requests = {
        "commands": [[*common, f"{ours}{run}", *output], [*common, "checkpoint=nowhere"]],
        "models": {name: dict(zip(names, values, strict=True)) for name, values in models.items()},
    }
    (work / "requests.json").write_text(json.dumps(requests))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HOME": str(work / "home")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "tests.support.run_harness", str(work)]
    done = subprocess.run(line, env=environment, cwd=work, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    answers = json.loads((work / "answers.json").read_text())
    (file,) = (work / "output").rglob("results_*.json")
    return Harness(run, answers["statuses"], json.loads(file.read_text()), answers["models"], done.stderr)


def test_the_command_writes_results_and_tells_mistakes(harness: Harness) -> None:
    assert harness.statuses == [0, 2]
    assert harness.written["results"]["local_choice"]["acc,none"] == pytest.approx(2 / 3)
    assert (harness.written["config"]["rounds"], harness.written["config"]["training_rounds"]) == (ROUNDS, 2)
    assert "\nerror: nowhere: no such folder; give a run folder or a checkpoint" in harness.errors


@pytest.mark.parametrize("name", ["run", "run-alone", "export", "hf"])
def test_choices_are_scored_as_by_plain_passes(name: str, harness: Harness) -> None:
    model, answers = harness.model, harness.answers[name]
    for responses, (context, *choices) in zip(answers["responses"]["local_choice"], CHOICES, strict=True):
        expected = [choice(harness, model, context, text) for text in choices]
        assert [float(response[0][0]) for response in responses] == pytest.approx(expected, abs=1e-4)
    assert answers["results"]["local_choice"]["acc,none"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["run", "run-alone", "export", "hf-no-bos"])
def test_whole_texts_are_scored_in_windows(name: str, harness: Harness) -> None:
    """The harness's `hf` reads a text's tokens with the separator, and adds one: add_bos_token=False."""
    model, answers, expected = harness.model, harness.answers[name], []
    for text in TEXTS:
        tokens = harness.tokens(text)
        total, count = 0.0, len(tokens) - 1
        for start in range(0, count, CONTEXT):
            end = min(start + CONTEXT, count)
            window = log_probabilities(model, tokens[max(end - CONTEXT, 0) : end + 1])
            total += float(window[len(window) - (end - start) :].sum())
        expected.append(total)
    assert len(harness.tokens(TEXTS[0])) > 2 * CONTEXT
    assert [responses[0][0] for responses in answers["responses"]["local_rolling"]] == pytest.approx(expected, abs=1e-3)
    bits = -sum(expected) / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert answers["results"]["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("name", ["run", "run-alone", "export", "hf"])
def test_continuations_are_those_of_plain_passes(name: str, harness: Harness) -> None:
    model, tokenizer = harness.model, harness.tokenizer
    expected = []
    for prompt in PROMPTS:
        tokens = start = harness.tokens(prompt)
        for _ in range(10):
            tokens = [*tokens, int(model(torch.tensor([tokens]), num_rounds=ROUNDS).logits[0, -1].argmax())]
            if tokens[-1] == tokenizer.eos_id or STOP in tokenizer.decode(tokens[len(start) :]):
                break
        expected.append(tokenizer.decode([t for t in tokens[len(start) :] if t != tokenizer.eos_id]).split(STOP)[0])
    assert any(expected)
    found = [responses[0][0] for responses in harness.answers[name]["responses"]["local_continue"]]
    assert found == expected


def test_groups_hold_the_papers_tasks_which_the_harness_knows() -> None:
    manager = TaskManager(include_path=str(TASKS))
    assert set(manager.all_subtasks) >= PAPER
    for shots in (0, 1):
        group = yaml.safe_load((TASKS / f"deeploop_{shots}shot.yaml").read_text())
        assert {task["task"] for task in group["task"]} == PAPER
        assert {task["num_fewshot"] for task in group["task"]} == {shots}
        assert group["group"] in manager.all_groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds: 0 must be a number of 1 or more"),
        ({"batch_size": "auto"}, "batch_size: auto must be a number of 1 or more"),
        ({"dtype": "int8"}, "dtype: 'int8' is unknown; use one of float32, bfloat16"),
        ({"checkpoint": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_mistakes_name_the_argument(options: dict[str, Any], message: str, harness: Harness) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        DeepLoopLM(**{"checkpoint": str(harness.run), **options})


def test_generation_refuses_what_it_would_ignore(harness: Harness) -> None:
    model = DeepLoopLM(str(harness.run), device="cpu")
    with pytest.raises(ConfigError, match="gen_kwargs: num_beams: is unknown here; use do_sample, max_gen_toks"):
        model._continue(["def "], {"max_gen_toks": 4, "num_beams": 2})
    with pytest.raises(ConfigError, match="max_gen_toks: 256 leaves no room for a prompt in the context of 48 tokens"):
        model._continue(["def "], {})
