"""The named models."""

from __future__ import annotations

import pytest

from deeploop_model import PRESETS, ModelConfigError, preset


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
    assert (config.head_dim, config.feed_forward_width, config.padded_vocab_size) == (64, 4 * width, 50304)


def test_small_preset_loops() -> None:
    config = preset("small-loop")
    assert (config.num_blocks, config.num_rounds, config.unrolled_depth) == (2, 4, 8)


def test_tutorial_looped_transformer() -> None:
    config = preset("looped-transformer")
    assert (config.d_model, config.num_heads, config.feed_forward_width) == (256, 4, 1024)
    assert (config.num_blocks, config.num_rounds, config.rule.norm) == (1, 4, "before")


def test_universal_transformer_is_one_block_told_its_round() -> None:
    config = preset("universal-transformer")
    assert (config.num_blocks, config.num_rounds, config.feed_forward_width) == (1, 6, 2048)
    assert (config.round_embedding, config.rule.norm, config.rule.alpha) == (True, "after", 1.0)


def test_huginn_like_has_prelude_core_coda_and_adapter() -> None:
    config = preset("huginn-like")
    assert config.unrolled_depth == 2 + 4 * 32 + 2
    assert (config.injection, config.head_dim, config.feed_forward_width) == ("concat-linear", 96, 17920)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_the_vocabulary_to_the_data(name: str) -> None:
    assert "vocab_size" not in PRESETS[name]


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ModelConfigError, match="'gpt3' is unknown; use one of small-loop, gpt2-small"):
        preset("gpt3")
