"""Presets and what a config refuses."""

from __future__ import annotations

from typing import Any

import pytest

from deeploop_model import DeepLoopConfig, ModelConfigError, preset


@pytest.mark.parametrize(
    ("name", "blocks", "width", "heads"),
    [
        ("gpt2-small", 12, 768, 12),
        ("gpt2-medium", 24, 1024, 16),
        ("gpt2-large", 36, 1280, 20),
        ("gpt2-xl", 48, 1600, 25),
    ],
)
def test_gpt2_presets(name: str, blocks: int, width: int, heads: int) -> None:
    config = preset(name, num_rounds=3)
    assert (config.num_blocks, config.d_model, config.num_heads, config.num_rounds) == (blocks, width, heads, 3)
    assert (config.head_dim, config.d_ff, config.padded_vocab_size) == (64, 4 * width, 50304)


def test_small_preset_loops() -> None:
    config = preset("small-loop")
    assert (config.num_blocks, config.num_rounds, config.unrolled_depth) == (2, 4, 8)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ModelConfigError, match="'gpt3' is unknown; use one of small-loop, gpt2-small"):
        preset("gpt3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: 0 must be 1 or more"),
        ({"num_rounds": -1}, "num_rounds: -1 must be 1 or more"),
        ({"d_model": 768, "num_heads": 7}, "num_heads: 7 does not cut d_model 768 .* use 6"),
        ({"d_model": 12, "num_heads": 4}, "num_heads: 4 does not cut d_model 12 into heads of even width, use 3"),
        ({"d_model": 15, "num_heads": 3}, "d_model is odd"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"residual": "deeplop"}, "residual: 'deeplop'"),
    ],
)
def test_impossible_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        DeepLoopConfig(**fields)


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (65, 128), (50257, 50304)])
def test_vocabulary_padding(size: int, padded: int) -> None:
    assert DeepLoopConfig(vocab_size=size).padded_vocab_size == padded
