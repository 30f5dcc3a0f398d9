"""Gradient norms by part of the model, under all ways of cutting and moving gradients, against autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from pretrain.config_file import check_config
from pretrain.data_feed import Batch
from pretrain.ds_config import load_ds_config
from pretrain.engine import Engine, build_engine, train_step
from pretrain.monitor.collective_times import timed_collectives
from pretrain.monitor.gradient_norms import gradient_norms, part_of
from pretrain.ranks import Ranks, process_group
from tests.support.ranks import run_ranks
from tests.support.runs import DS_CONFIGS, VOCAB, small_tree

NAMES = tuple(sorted(path.stem for path in DS_CONFIGS.glob("*.json")))
FROZEN = "blocks.1.feed_forward.up.weight"


def global_batch() -> torch.Tensor:
    """8 sequences: 2 micro-batches of 2 on each of 2 ranks."""
    return torch.randint(0, VOCAB, (8, 17), generator=torch.Generator().manual_seed(0))


def small_model() -> DeepLoopModel:
    model = DeepLoopModel(
        DeepLoopConfig(
            num_blocks=2, num_rounds=2, num_prelude_blocks=1, d_model=32, num_heads=2, vocab_size=VOCAB,
            context_length=16,
        )
    )  # fmt: skip
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def norms_under(out: Path, data: Path, names: tuple[str, ...]) -> list[tuple[dict[str, float], float]]:
    """Norms by part, and DeepSpeed's global norm, of one step under each of our DeepSpeed files."""
    config, ranks, found = check_config(small_tree(out, data, micro_batch_size=2), "test"), Ranks.from_environment(), []
    with process_group(ranks):
        for name in names:
            ds_config = load_ds_config(DS_CONFIGS / f"{name}.json", config, ranks.world_size)
            engine = build_engine(small_model(), config, ds_config)
            rows = [global_batch()[4 * step + 2 * ranks.rank :][:2] for step in range(2)]
            noted: list[dict[str, float]] = []

            def note(engine: Engine = engine, noted: list[dict[str, float]] = noted) -> None:
                noted.append(gradient_norms(engine))

            batches = [Batch(part[:, :-1], part[:, 1:], None) for part in rows]
            with timed_collectives() as collectives:
                train_step(engine, batches, 2, config.train, before_update=note)
            assert collectives.count > len(noted[0])  # those of the norms, and the step's own
            assert collectives.seconds > 0
            (norms,) = noted
            found.append((norms, float(engine.get_global_grad_norm())))
    return found


def test_norms_of_parts_are_those_of_one_process_and_add_up(dataset: Path, tmp_path: Path) -> None:
    model = small_model().bfloat16().double()
    batch = global_batch()
    model(batch[:, :-1], batch[:, 1:]).loss.backward()
    squares: dict[str, float] = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + float(weight.grad.square().sum())
    assert len(squares) == 1 + 1 + 2 * 3  # embedding, its norm, two sub-layers of three blocks
    for result in run_ranks(2, norms_under, tmp_path, dataset, NAMES, folder=tmp_path):
        assert len(result.value) == 5
        for norms, of_all in result.value:
            assert norms == pytest.approx({part: square**0.5 for part, square in squares.items()}, rel=0.02)
            assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(of_all, rel=1e-4)


def test_parts_are_sub_layers_with_their_norms() -> None:
    assert part_of("blocks.11.attention.qkv.weight") == "blocks.11.attention"
    assert part_of("blocks.11.attention_norm.weight") == "blocks.11.attention"
    assert part_of("coda.0.feed_forward.down.weight") == "coda.0.feed_forward"
    assert part_of("embedding_norm.weight") == "embedding_norm"
