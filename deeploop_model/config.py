"""What a DeepLoop model is made of: one frozen, checked dataclass, and the named presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from deeploop_model.errors import ModelConfigError
from deeploop_model.residual import ExponentRule, ResidualRule, RuleName, residual_rule

VOCAB_MULTIPLE = 64  # matrix units want aligned widths; 50,257 -> 50,304

# Blocks, width and heads of the GPT-2 family (Radford et al. 2019); R = 1 until `num_rounds` says otherwise.
PRESETS: dict[str, dict[str, Any]] = {
    "small-loop": {"num_blocks": 2, "num_rounds": 4, "d_model": 128, "num_heads": 4, "context_length": 128},
    "gpt2-small": {"num_blocks": 12, "d_model": 768, "num_heads": 12},
    "gpt2-medium": {"num_blocks": 24, "d_model": 1024, "num_heads": 16},
    "gpt2-large": {"num_blocks": 36, "d_model": 1280, "num_heads": 20},
    "gpt2-xl": {"num_blocks": 48, "d_model": 1600, "num_heads": 25},
}


def preset(name: str, **overrides: Any) -> DeepLoopConfig:
    """The config of a named preset with some fields replaced. Raises ModelConfigError for an unknown name."""
    return DeepLoopConfig(**{**preset_fields(name), **overrides})


def preset_fields(name: str) -> dict[str, Any]:
    """The fields that a preset sets. Raises ModelConfigError for an unknown name."""
    if name not in list(PRESETS):
        raise ModelConfigError(f"preset: {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])


@dataclass(frozen=True)
class DeepLoopConfig:
    """A causal GPT whose stack of K blocks runs R rounds. Raises ModelConfigError for what cannot be built."""

    num_blocks: int = 12
    """K: physical blocks, each with its own weights."""
    num_rounds: int = 1
    """R: times that the whole stack is applied in training. Sets alpha and beta; other R may be run later."""
    d_model: int = 768
    """Width of the stream."""
    num_heads: int = 12
    """Attention heads, each of width d_model / num_heads."""
    context_length: int = 1024
    """Longest sequence in tokens."""
    vocab_size: int = 50257
    """Token ids run from 0 to vocab_size - 1. Stored matrices are padded to a multiple of 64."""
    residual: RuleName | ExponentRule = "deeploop"
    """The residual rule, see `deeploop_model.residual`."""
    init: Literal["xavier", "normal_0.02"] = "xavier"
    """Base initialiser of the blocks' matrices: Xavier normal with each matrix's own fans, or GPT-2's N(0, 0.02^2)."""
    tie_embeddings: bool = True
    """Whether the output matrix is the token embedding."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_rounds", "d_model", "num_heads", "context_length", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ModelConfigError(f"{name}: {value} must be 1 or more")
        if self.d_model % self.num_heads or self.head_dim % 2:
            possible = [h for h in range(1, self.d_model + 1) if self.d_model % (2 * h) == 0]
            raise ModelConfigError(
                f"num_heads: {self.num_heads} does not cut d_model {self.d_model} into heads of even width, "
                + (f"use {min(possible, key=lambda h: abs(h - self.num_heads))}" if possible else "d_model is odd")
            )
        if self.rope_base <= 0:
            raise ModelConfigError(f"rope_base: {self.rope_base} must be positive")
        if self.norm_eps <= 0:
            raise ModelConfigError(f"norm_eps: {self.norm_eps} must be positive")
        self.rule  # noqa: B018  an unknown residual rule fails here, not at the first forward pass

    @property
    def unrolled_depth(self) -> int:
        """N = K*R."""
        return self.num_blocks * self.num_rounds

    @property
    def num_visits(self) -> int:
        """M = 2N: an attention and a feed-forward visit per block and round."""
        return 2 * self.unrolled_depth

    @property
    def rule(self) -> ResidualRule:
        """alpha, beta and the norm's place at the training depth N."""
        return residual_rule(self.residual, self.unrolled_depth)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward branch."""
        return 4 * self.d_model

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
