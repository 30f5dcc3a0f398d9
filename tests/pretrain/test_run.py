"""The whole run on real ranks over gloo: what it writes, resuming bit by bit, and errors on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deeploop_model.compilation import missing_compiler
from pretrain import run
from pretrain.config_file import load_config
from pretrain.engine import train_step
from tests.support.datasets import write_dataset
from tests.support.ranks import run_ranks
from tests.support.runs import (
    CPU_CONFIG,
    DS_CONFIGS,
    metrics,
    optimizer_tensors,
    run_main,
    small_dataset,
    small_tree,
    write_tree,
)

STEP_20 = Path("checkpoints/step_00000020")


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def pair(request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run folders of 20 steps at once, and of 10, stop, resume, 10 more."""
    folder = tmp_path_factory.mktemp("runs")
    whole = write_tree(folder / "whole.yaml", small_tree(folder / "whole", dataset))
    parts = write_tree(folder / "parts.yaml", small_tree(folder / "parts", dataset))
    ranks = request.param
    assert [r.value for r in run_ranks(ranks, run_main, whole, folder=folder)] == [0] * ranks
    assert [r.value for r in run_ranks(ranks, stopped_after_10, parts, folder=folder)] == ["stopped"] * ranks
    assert [r.value for r in run_ranks(ranks, run_main, parts, "--resume", "auto", folder=folder)] == [0] * ranks
    return folder / "whole", folder / "parts"


class KilledError(Exception):
    """Ends a run from inside."""


def stopped_after_10(config: Path) -> str:
    """A run of 20 steps that dies in step 13, after the checkpoint of step 10."""
    done = 0

    def dying_step(*args: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done > 12:
            raise KilledError
        return train_step(*args)

    with patch.object(run, "train_step", dying_step):
        try:
            run_main(config)
        except KilledError:
            return "stopped"
    return "ran to its end"


def test_resumed_run_equals_the_uninterrupted_one_bit_by_bit(pair: tuple[Path, Path]) -> None:
    whole, parts = pair
    assert metrics(whole) == metrics(parts)
    assert [line["step"] for line in metrics(parts) if "loss" in line] == list(range(1, 21))
    a, b = optimizer_tensors(whole / STEP_20), optimizer_tensors(parts / STEP_20)
    assert a.keys() == b.keys()
    assert sum("/master/" in name for name in a) == 2 * len(list((whole / STEP_20).glob("*optim_states.pt")))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(
        torch.equal(a[n], t)
        for n, t in optimizer_tensors(whole / "checkpoints/step_00000010").items()
        if "/master/" in n
    )


def test_run_learns_and_leaves_what_it_promises(pair: tuple[Path, Path], dataset: Path) -> None:
    whole, _ = pair
    lines = metrics(whole)
    training = [line for line in lines if "loss" in line]
    assert training[-1]["loss"] < training[0]["loss"] - 0.5
    assert training[-1].keys() == {
        "step",
        "tokens",
        "loss",
        "perplexity",
        "bits_per_byte",
        "lr",
        "grad_norm",
        "rounds",
        "flops",
        "epoch",
    }
    assert training[-1]["tokens"] == 20 * 8 * 16
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir() if p.is_dir()) == ["step_00000010", "step_00000020"]
    text = (whole / "config.yaml").read_text()
    assert all(word in text for word in ("# torch 2.", "# deepspeed 0.19.8", "# git "))
    assert load_config(whole / "config.yaml").model.vocab_size == 61
    assert (whole / "logs").is_dir()


@pytest.mark.parametrize("which", [0, 1], ids=["whole", "resumed"])
def test_tensorboard_shows_every_step_once(pair: tuple[Path, Path], which: int) -> None:
    out = pair[which]
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    by_step = {line["step"]: line for line in metrics(out) if "loss" in line}
    for tag in ("loss", "lr", "grad_norm"):
        points = events.Scalars(f"train/{tag}")
        assert [p.step for p in points] == list(range(1, 21))
        assert [p.value for p in points] == pytest.approx([by_step[p.step][tag] for p in points], rel=1e-6)
    assert [p.step for p in events.Scalars("validation/loss")] == [10, 20]


def test_run_of_two_ranks_computes_what_one_computes(dataset: Path, tmp_path: Path) -> None:
    """The same global batches: losses agree up to bf16 noise, the learning rate to the bit."""
    lines = []
    for ranks in (1, 2):
        tree = small_tree(tmp_path / f"out{ranks}", dataset, steps=6)
        config = write_tree(tmp_path / f"{ranks}.yaml", tree)
        run_ranks(ranks, run_main, config, folder=tmp_path)
        lines.append([line for line in metrics(tmp_path / f"out{ranks}") if "loss" in line or "val_loss" in line])
    assert [line["step"] for line in lines[0]] == [1, 2, 3, 4, 5, 6, 6]
    for one, two in zip(*lines, strict=True):
        assert one.get("lr") == two.get("lr")
        kind = "loss" if "loss" in one else "val_loss"
        assert one[kind] == pytest.approx(two[kind], rel=5e-3)


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_compiled_run_follows_the_other(dataset: Path, tmp_path: Path) -> None:
    """On two ranks, with accumulation and recomputation."""
    lines = []
    for compiled in (False, True):
        tree = small_tree(
            tmp_path / f"out{compiled}", dataset, steps=4, micro_batch_size=2, compile=compiled, recompute="nested"
        )
        config = write_tree(tmp_path / f"{compiled}.yaml", tree)
        result, _ = run_ranks(2, run_main, config, folder=tmp_path)
        assert ("the first step compiles the block" in result.stdout) == compiled
        lines.append([line["loss"] for line in metrics(tmp_path / f"out{compiled}") if "loss" in line])
    assert lines[0] != lines[1]
    assert lines[0] == pytest.approx(lines[1], rel=5e-3)


def test_alignment_of_visits_is_measured_on_chosen_steps_over_all_ranks(dataset: Path, tmp_path: Path) -> None:
    """kappa of a step comes from squares added over the ranks, so two ranks tell what one does."""
    lines = []
    for ranks in (1, 2):
        tree = small_tree(tmp_path / f"out{ranks}", dataset, steps=4, micro_batch_size=4)
        tree["monitor"]["kappa_every"] = 2
        tree["model"]["num_rounds"] = 4
        config = write_tree(tmp_path / f"{ranks}.yaml", tree)
        run_ranks(ranks, run_main, config, folder=tmp_path)
        lines.append([line for line in metrics(tmp_path / f"out{ranks}") if any("kappa" in key for key in line)])
    names = [f"blocks.{k}.{layer}" for k in (0, 1) for layer in ("attention", "feed_forward")]
    for one, two in zip(*lines, strict=True):
        assert one.keys() == {
            "step",
            "tokens",
            *(f"{what}/{name}" for what in ("kappa", "stability") for name in names),
        }
        assert one == pytest.approx(two, rel=0.02)
        assert all(0 < one[f"kappa/{name}"] < 4.001 for name in names)
        # M (beta/alpha)^2 = 16 / (4 * 8)^2 for deeploop at N = 8.
        assert all(one[f"stability/{name}"] == pytest.approx(one[f"kappa/{name}"] / 64) for name in names)
    assert [line["step"] for line in lines[0]] == [2, 4]
    events = EventAccumulator(str(tmp_path / "out2" / "tensorboard"))
    events.Reload()
    points = events.Scalars("visits/kappa/blocks.1.attention")
    assert [(p.step, p.value) for p in points] == [
        (line["step"], pytest.approx(line["kappa/blocks.1.attention"], rel=1e-6)) for line in lines[1]
    ]


def steps_under(name: str, dataset: Path, folder: Path) -> list[float]:
    """Losses, then gradient norms, of 3 steps on two ranks with accumulation 4 and one of our DeepSpeed files."""
    tree = small_tree(folder / name, dataset, steps=3, micro_batch_size=1)
    tree["checkpoint"]["every"] = 0
    config = write_tree(folder / f"{name}.yaml", tree)
    results = run_ranks(2, run_with_ds_config, config, DS_CONFIGS / f"{name}.json", folder=folder)
    assert [r.value for r in results] == [0, 0]
    assert (folder / name / "checkpoints/step_00000003").is_dir()
    lines = [line for line in metrics(folder / name) if "loss" in line]
    return [line[key] for key in ("loss", "grad_norm") for line in lines]


def run_with_ds_config(config: Path, ds_config: Path) -> int:
    return run_main(config, ds_config=ds_config)


@pytest.fixture(scope="module")
def cpu_steps(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return steps_under("zero2_bf16_cpu", dataset, tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize("name", sorted(path.stem for path in DS_CONFIGS.glob("*.json") if path != CPU_CONFIG))
def test_every_ds_config_trains(name: str, cpu_steps: list[float], dataset: Path, tmp_path: Path) -> None:
    """All follow the same losses and gradient norms, whatever they cut over the ranks or keep in host memory."""
    assert len(cpu_steps) == 6
    assert steps_under(name, dataset, tmp_path) == pytest.approx(cpu_steps, rel=5e-3)


def many_mains(cases: list[tuple[Path, list[str]]]) -> list[int]:
    return [run_main(config, *overrides) for config, overrides in cases]


def test_user_errors_are_one_line_on_every_rank(dataset: Path, tmp_path: Path) -> None:
    """Each kind of bad input: the same single line and exit status on both ranks, and nobody waits."""
    good = small_tree(tmp_path / "out", dataset)
    config = write_tree(tmp_path / "good.yaml", good)
    missing = write_tree(tmp_path / "missing.yaml", {k: v for k, v in good.items() if k != "data"})
    no_dataset = tmp_path / "somewhere"
    no_dataset.mkdir()
    empty = tmp_path / "empty"
    write_dataset(empty, {"train": [], "validation": []})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    cases: list[tuple[Path, list[str], str]] = [
        (missing, [], "data: is required and missing"),
        (config, ["train.stepz=3"], "train.stepz: unknown key; did you mean 'steps'?"),
        (config, ["train.steps=many"], "train.steps: 'many' must be a valid integer"),
        (
            config,
            ["train.global_batch_size=9"],
            "9 is not a multiple of train.micro_batch_size 4 x 2 ranks = 8",
        ),
        (config, ["model.vocab_size=10"], "model.vocab_size: 10 is smaller than the vocabulary of"),
        (config, ["model.context_length=5000"], "tokens hold no window of context + 1 = 5001"),
        (config, [f"data.path={no_dataset}"], "no manifest.json"),
        (config, [f"data.path={empty}"], "0 tokens hold no window"),
        (config, ["--resume", str(tmp_path / "nowhere")], "no such folder"),
        (config, ["--resume", str(foreign)], "is not a checkpoint of this project"),
    ]
    results = run_ranks(2, many_mains, [case[:2] for case in cases], folder=tmp_path)
    for rank, result in enumerate(results):
        assert result.value == [2] * len(cases)
        lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
        assert len(lines) == len(cases)
        for line, (_, _, message) in zip(lines, cases, strict=True):
            assert line.startswith(f"error (rank {rank}): ")
            assert message in line
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_another_model_is_refused(pair: tuple[Path, Path], dataset: Path, tmp_path: Path) -> None:
    whole, _ = pair
    config = write_tree(tmp_path / "other.yaml", small_tree(tmp_path / "out", dataset))
    ranks = len(list((whole / STEP_20).glob("*optim_states.pt")))
    cases = [
        (config, ["--resume", str(whole / STEP_20), "model.num_rounds=3"]),
        (config, ["--resume", str(whole / STEP_20), "train.seed=1"]),
        (
            config,
            ["--resume", str(whole / STEP_20), f"data.path={small_dataset(tmp_path / 'other', train_tokens=4000)}"],
        ),
    ]
    for result in run_ranks(ranks, many_mains, cases, folder=tmp_path):
        assert result.value == [2, 2, 2]
        errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
        assert "model.num_rounds is 2 there and 3 in this run (it is of another model)" in errors[0]
        assert "seed is 0 there and 1 in this run" in errors[1]
        assert "data_fingerprint" in errors[2]
