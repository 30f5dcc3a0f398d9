"""What a config refuses, and its defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deeploop_model import DeepLoopConfig, ModelConfigError


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
        ({"num_prelude_blocks": -1}, "num_prelude_blocks: -1 must be 0 or more"),
        ({"num_coda_blocks": -2}, "num_coda_blocks: -2 must be 0 or more"),
        ({"d_ff": 0}, "d_ff: 0 must be 1 or more"),
        ({"num_kv_heads": 0}, "num_kv_heads: 0 must be 1 or more"),
        ({"num_kv_heads": 5}, "num_kv_heads: 5 does not divide num_heads 12; use one of 1, 2, 3, 4, 6, 12"),
        ({"num_kv_heads": 24}, "num_kv_heads: 24 does not divide num_heads 12"),
        ({"injection": "concat"}, "injection: 'concat' is unknown; use one of none, add, concat-linear"),
        ({"position": "alibi"}, "position: 'alibi' is unknown; use one of rope, learned, none"),
        ({"feed_forward": "relu"}, "feed_forward: 'relu' is unknown; use one of gelu, swiglu"),
        ({"init": "kaiming"}, "init: 'kaiming' is unknown; use one of xavier, normal_0.02"),
        ({"position": "none", "rope_base": 5e5}, "rope_base: 500000.0 has no effect with position none"),
        ({"position": "learned", "d_model": 10, "num_heads": 4}, "num_heads: 4 .* into heads of equal width, use 5"),
    ],
)
def test_impossible_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        DeepLoopConfig(**fields)


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (64, 64), (65, 128), (50257, 50304)])
def test_vocabulary_padding(size: int, padded: int) -> None:
    assert DeepLoopConfig(vocab_size=size).padded_vocab_size == padded


def test_widths_by_default() -> None:
    assert DeepLoopConfig(d_model=768).feed_forward_width == 3072
    assert DeepLoopConfig(d_model=768, feed_forward="swiglu").feed_forward_width == 2048
    assert DeepLoopConfig(d_model=1600, num_heads=25, feed_forward="swiglu").feed_forward_width == 4288  # of 4266.7
    assert DeepLoopConfig(d_model=768, feed_forward="swiglu", d_ff=100).feed_forward_width == 100
    assert DeepLoopConfig(num_heads=12).kv_heads == 12


def test_defaults_follow_a_changed_width() -> None:
    assert dataclasses.replace(DeepLoopConfig(d_model=768), d_model=96).feed_forward_width == 384
