"""What a DeepLoop model is made of: one frozen, checked dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from deeploop_model.errors import ModelConfigError
from deeploop_model.residual import ExponentRule, ResidualRule, RuleName, residual_rule

Injection = Literal["none", "add", "concat-linear"]
Position = Literal["rope", "learned", "none"]
FeedForwardKind = Literal["gelu", "swiglu"]
BaseInit = Literal["xavier", "normal_0.02"]

VOCAB_MULTIPLE = 64  # matrix units want aligned widths; 50,257 -> 50,304
DEFAULT_ROPE_BASE = 10000.0


@dataclass(frozen=True)
class DeepLoopConfig:
    """A causal GPT: P prelude blocks, a stack of K blocks run R rounds, C coda blocks.

    Raises ModelConfigError for what cannot be built.
    """

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
    residual_depth: int | None = None
    """N that alpha and beta are computed from; the model's own by default. For blocks that were trained at another."""
    init: BaseInit = "xavier"
    """Base initialiser of the blocks' matrices: Xavier normal with each matrix's own fans, or GPT-2's N(0, 0.02^2)."""
    tie_embeddings: bool = True
    """Whether the output matrix is the token embedding."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    num_prelude_blocks: int = 0
    """P: blocks before the loop, each with its own weights and visited once."""
    num_coda_blocks: int = 0
    """C: blocks after the loop, each with its own weights and visited once."""
    injection: Injection = "none"
    """How the loop's input comes back before every round, see `deeploop_model.injection`."""
    round_embedding: bool = False
    """Whether a learned vector per round, zero at first, is added to the stream before each round."""

    position: Position = "rope"
    """Rotary in every attention visit, a learned vector added to the token embedding, or nothing."""
    rope_base: float = DEFAULT_ROPE_BASE
    """Base of the rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""
    num_kv_heads: int | None = None
    """Key and value heads, each shared by num_heads / num_kv_heads query heads; num_heads by default."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head, with learned weights."""
    feed_forward: FeedForwardKind = "gelu"
    """down(GELU(up(x))), or the gated down(SiLU(gate(x)) * up(x))."""
    d_ff: int | None = None
    """Width of the feed-forward branch. By default 4d for gelu, and for swiglu 8/3 d rounded up to a multiple of 64:
    as many weights."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_blocks", 1), ("num_rounds", 1), ("d_model", 1), ("num_heads", 1), ("context_length", 1),
            ("vocab_size", 1), ("num_prelude_blocks", 0), ("num_coda_blocks", 0), ("num_kv_heads", 1), ("d_ff", 1),
            ("residual_depth", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ModelConfigError(f"{name}: {value} must be {least} or more")
        for name, choices in (
            ("init", BaseInit), ("injection", Injection), ("position", Position), ("feed_forward", FeedForwardKind),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(choices):
                raise ModelConfigError(
                    f"{name}: {getattr(self, name)!r} is unknown; use one of {', '.join(get_args(choices))}"
                )
        self._check_heads()
        if self.rope_base <= 0:
            raise ModelConfigError(f"rope_base: {self.rope_base} must be positive")
        if self.rope_base != DEFAULT_ROPE_BASE and self.position != "rope":
            raise ModelConfigError(
                f"rope_base: {self.rope_base} has no effect with position {self.position}; "
                "leave it out, or set position to rope"
            )
        if self.norm_eps <= 0:
            raise ModelConfigError(f"norm_eps: {self.norm_eps} must be positive")
        self.rule  # noqa: B018  an unknown residual rule fails here, not at the first forward pass

    def _check_heads(self) -> None:
        multiple = 2 if self.position == "rope" else 1  # rotary embedding turns pairs
        if self.d_model % self.num_heads or self.head_dim % multiple:
            possible = [h for h in range(1, self.d_model + 1) if self.d_model % (multiple * h) == 0]
            even = "of even width, " if self.position == "rope" else "of equal width, "
            raise ModelConfigError(
                f"num_heads: {self.num_heads} does not cut d_model {self.d_model} into heads {even}"
                + (
                    f"use {min(possible, key=lambda h: abs(h - self.num_heads))}"
                    if possible
                    else "d_model is odd, and rotary positions need even heads"
                )
            )
        if self.num_heads % self.kv_heads:
            possible = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise ModelConfigError(
                f"num_kv_heads: {self.kv_heads} does not divide num_heads {self.num_heads}; "
                f"use one of {', '.join(map(str, possible))}"
            )

    @property
    def unrolled_depth(self) -> int:
        """N = P + K*R + C: block visits of one forward pass at the R of training."""
        return self.num_prelude_blocks + self.num_blocks * self.num_rounds + self.num_coda_blocks

    @property
    def num_visits(self) -> int:
        """M = 2N: an attention and a feed-forward visit per block visit."""
        return 2 * self.unrolled_depth

    @property
    def rule(self) -> ResidualRule:
        """alpha, beta and the norm's place at the training depth N, or at `residual_depth`."""
        return residual_rule(self.residual, self.residual_depth or self.unrolled_depth)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads` with its default in place."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def feed_forward_width(self) -> int:
        """`d_ff` with its default in place."""
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.feed_forward == "gelu" else -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
