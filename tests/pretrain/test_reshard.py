"""A checkpoint of W ranks on W' ranks: bit by bit the same masters and moments, then the same batches."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from pretrain import checkpoint, run
from pretrain.data_feed import TrainFeed
from pretrain.engine import build_engine
from pretrain.ranks import Ranks, process_group
from tests.support.ranks import run_ranks
from tests.support.runs import DS_CONFIGS, metrics, run_main, small_tree, write_tree

WORLDS = (1, 2, 3, 4)
LAST = Path("checkpoints/step_00000004")


def state_of(engine: Any) -> dict[str, Tensor]:
    """All that the optimizer holds, by weight, put together from all ranks by DeepSpeed's own means."""
    engine.optimizer._link_all_hp_params()
    if not engine.zero_optimization_partition_weights():
        engine.optimizer._hp_optimizer_states_linked = False  # loading undoes what step() does here
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, weight in engine.module.named_parameters():
        with GatheredParameters([weight]):
            found[f"{name}/bf16"] = weight.detach().clone()
        if not weight.requires_grad:
            continue
        found[f"{name}/master"] = safe_get_full_fp32_param(weight)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = safe_get_full_optimizer_state(weight, key)
    for group in engine.optimizer.optimizer.state.values():
        found["steps"] = group["step"].clone()
    return found


Watched = tuple[int, dict[str, Tensor], list[list[Any]]]


def watched_main(config: Path, ds_config: Path, *overrides: str) -> Watched:
    """The run; what the engine held once it was loaded (or, with nothing loaded, at the end); this rank's samples."""
    engines, seen = [], []
    loaded: dict[str, Tensor] = {}
    load, micro_batches, train = checkpoint.load, TrainFeed.micro_batches, run.train

    def watched_build(*args: Any) -> Any:
        engines.append(build_engine(*args))
        return engines[0]

    def watched_load(engine: Any, folder: Path) -> None:
        load(engine, folder)
        loaded.update(state_of(engine))

    def watched_batches(self: TrainFeed, batch: int) -> Any:
        for micro_batch in micro_batches(self, batch):
            seen.append([batch, *map(tuple, micro_batch.tokens_BT.tolist())])
            yield micro_batch

    def at_the_end(*args: Any, **kwargs: Any) -> Any:
        ended = train(*args, **kwargs)
        if not loaded:
            loaded.update(state_of(engines[0]))
        return ended

    with (
        patch.object(checkpoint, "load", watched_load),
        patch.object(run, "build_engine", watched_build),
        patch.object(TrainFeed, "micro_batches", watched_batches),
        patch.object(run, "train", at_the_end),
    ):
        exit_code = run_main(config, *overrides, ds_config=ds_config)
    return exit_code, loaded, seen


def watched_mains(config: Path, ds_config: Path, starts: list[list[str]]) -> list[Watched]:
    """One after another in one process group: DeepSpeed remembers the first one of a process."""
    with process_group(Ranks.from_environment()), patch.object(run, "process_group", lambda *_: nullcontext()):
        return [watched_main(config, ds_config, *overrides) for overrides in starts]


class Held(NamedTuple):
    """What the ranks of a run had together."""

    state: dict[str, Tensor]
    """After loading, or at the end."""
    batches: dict[int, list[Any]]
    """Sorted windows of each global batch."""
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""


def watched_runs(world: int, config: Path, ds_config: Path, outs: list[Path], resume: list[Path]) -> list[Held]:
    """Runs on `world` ranks, one after another, that resume the given checkpoints."""
    starts = [[f"out={out}"] for out in outs]
    if resume:
        starts = [[*one, "--resume", str(path), "train.steps=6"] for one, path in zip(starts, resume, strict=True)]
    results = run_ranks(world, watched_mains, config, ds_config, starts, folder=config.parent)
    held = []
    for out, *by_rank in zip(outs, *(r.value for r in results), strict=True):
        exits, states, seen = zip(*by_rank, strict=True)
        assert exits == (0,) * world
        assert all(state.keys() == states[0].keys() for state in states)
        assert all(torch.equal(state[key], states[0][key]) for state in states for key in state)
        batches: dict[int, list[Any]] = {}
        for batch, *ids in itertools.chain.from_iterable(seen):
            batches.setdefault(batch, []).extend(ids)
        held.append(Held(states[0], {batch: sorted(ids) for batch, ids in batches.items()}, metrics(out)))
    return held


def tree_for_all_worlds(out: Path, dataset: Path, **train: Any) -> dict[str, Any]:
    """12 sequences divide among 1 to 4 ranks."""
    return small_tree(out, dataset, steps=4, global_batch_size=12, micro_batch_size=1, validate_every=0, **train)


class Saved(NamedTuple):
    """What the runs of 1 to 4 ranks left."""

    config: Path
    ds_config: Path
    held: dict[int, tuple[Path, Held]]
    """By number of ranks the checkpoint of step 4 and what the ranks held then."""


@pytest.fixture(scope="module", params=["zero2_bf16_cpu", "zero1_bf16", "zero3_bf16"])
def saved(request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Some weights do not learn; ZeRO-3 has several flat tensors for a parameter group."""
    folder = tmp_path_factory.mktemp("saved")
    config = write_tree(folder / "run.yaml", tree_for_all_worlds(folder / "out", dataset, frozen=["blocks.0.*_norm.*"]))
    ds_config = DS_CONFIGS / f"{request.param}.json"
    if request.param == "zero3_bf16":
        tree = json.loads(ds_config.read_text())
        tree["zero_optimization"]["sub_group_size"] = 4000
        ds_config = folder / "ds_config.json"
        ds_config.write_text(json.dumps(tree))
    found = {}
    for world in WORLDS:
        out = folder / f"out{world}"
        [held] = watched_runs(world, config, ds_config, [out], [])
        found[world] = (out / LAST, held)
    return Saved(config, ds_config, found)


@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_ranks_goes_on_from_any_other(saved: Saved, world: int, tmp_path: Path) -> None:
    outs = [tmp_path / f"from{other}" for other in WORLDS]
    resume = [saved.held[other][0] for other in WORLDS]
    runs = watched_runs(world, saved.config, saved.ds_config, outs, resume)
    usual = runs[WORLDS.index(world)]  # with as many ranks as saved: nothing is cut anew
    for other, run_on in zip(WORLDS, runs, strict=True):
        held = saved.held[other][1].state
        assert run_on.state.keys() == held.keys()
        assert [key for key in held if not torch.equal(held[key], run_on.state[key])] == [], f"{other} -> {world}"
        assert float(run_on.state["steps"]) == 4
        assert run_on.batches == usual.batches
        assert list(run_on.batches) == [4, 5]
        assert [line["step"] for line in run_on.lines] == [5, 6]
        assert [line["lr"] for line in run_on.lines] == [line["lr"] for line in usual.lines]
        # Reduction order differs, and did in the steps before.
        assert [line["loss"] for line in run_on.lines] == pytest.approx(
            [line["loss"] for line in usual.lines], rel=2e-3
        )
