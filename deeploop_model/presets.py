"""Named models: the GPT-2 family, and the looped models of the literature."""

from __future__ import annotations

from typing import Any

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError

PRESETS: dict[str, dict[str, Any]] = {
    "small-loop": {"num_blocks": 2, "num_rounds": 4, "d_model": 128, "num_heads": 4, "context_length": 128},
    # Blocks, width and heads of the GPT-2 family (Radford et al. 2019); R = 1 until `num_rounds` says otherwise.
    "gpt2-small": {"num_blocks": 12, "d_model": 768, "num_heads": 12},
    "gpt2-medium": {"num_blocks": 24, "d_model": 1024, "num_heads": 16},
    "gpt2-large": {"num_blocks": 36, "d_model": 1280, "num_heads": 20},
    "gpt2-xl": {"num_blocks": 48, "d_model": 1600, "num_heads": 25},
    # The small looped Transformer that tutorials start from: one shared pre-norm block, feed-forward width 1,024.
    "looped-transformer": {
        "num_blocks": 1,
        "num_rounds": 4,
        "d_model": 256,
        "num_heads": 4,
        "context_length": 256,
        "residual": "pre_ln",
    },
    # Dehghani et al. 2019, arXiv:1807.03819, as a decoder of the base size: one block, post-norm, told which step it
    # is in. Position and step are learned here and the position enters once; there they are sinusoids at every step.
    "universal-transformer": {
        "num_blocks": 1,
        "num_rounds": 6,
        "d_model": 512,
        "num_heads": 8,
        "context_length": 512,
        "residual": "post_ln",
        "position": "learned",
        "round_embedding": True,
    },
    # Sizes of Huginn-0125 (Geiping et al. 2025, arXiv:2502.05171): 2 + 4 x 32 + 2 blocks. It differs in that its loop
    # starts from noise, and in its norms (before and after each branch); here: the prelude's output, and `residual`.
    "huginn-like": {
        "num_prelude_blocks": 2,
        "num_blocks": 4,
        "num_coda_blocks": 2,
        "num_rounds": 32,
        "d_model": 5280,
        "num_heads": 55,
        "d_ff": 17920,
        "feed_forward": "swiglu",
        "injection": "concat-linear",
        "rope_base": 50000.0,
        "context_length": 4096,
    },
}


def preset(name: str, **overrides: Any) -> DeepLoopConfig:
    """The config of a named preset with some fields replaced. Raises ModelConfigError for an unknown name."""
    return DeepLoopConfig(**{**preset_fields(name), **overrides})


def preset_fields(name: str) -> dict[str, Any]:
    """The fields that a preset sets. Raises ModelConfigError for an unknown name."""
    if name not in list(PRESETS):
        raise ModelConfigError(f"preset: {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
