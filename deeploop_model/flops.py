"""Floating-point operations of a forward pass, by the rounds that it really runs.

A multiply-add counts as 2. Counted are the matrix products: projections, feed-forward, attention, the injection's
adapter, the output matrix (with the padding of the vocabulary, which is computed too). Norms, activations, rotations
and look-ups are not counted; at d = 1024 they are under 1 %.

Attention counts all T x T pairs, 4*T*d per token and visit, as PyTorch's and DeepSpeed's counters do; a kernel that
skips the masked half does half of it.
"""

from __future__ import annotations

from deeploop_model.config import DeepLoopConfig

BACKWARD_PER_FORWARD = 2
"""Each matrix product of the forward pass has two of its size in the backward pass."""


def attention_flops(config: DeepLoopConfig, length: int) -> int:
    """Scores and weighted values of one attention visit, per token of a sequence of `length` tokens."""
    return 2 * 2 * length * config.num_heads * config.head_dim


def block_flops(config: DeepLoopConfig, length: int) -> int:
    """One visit of one block (attention and feed-forward), per token."""
    d, kv_width = config.d_model, config.kv_heads * config.head_dim
    projections = d * (d + 2 * kv_width) + d * d
    feed_forward = (3 if config.feed_forward == "swiglu" else 2) * d * config.feed_forward_width
    return 2 * (projections + feed_forward) + attention_flops(config, length)


def round_flops(config: DeepLoopConfig, length: int) -> int:
    """One round: injection and K blocks, per token."""
    adapter = 2 * 2 * config.d_model**2 if config.injection == "concat-linear" else 0
    return config.num_blocks * block_flops(config, length) + adapter


def forward_flops(config: DeepLoopConfig, num_rounds: int | None = None, length: int | None = None) -> int:
    """A forward pass of `num_rounds` rounds over sequences of `length` tokens, per token.

    By default the config's own rounds and context length.
    """
    num_rounds = config.num_rounds if num_rounds is None else num_rounds
    length = config.context_length if length is None else length
    once = config.num_prelude_blocks + config.num_coda_blocks
    output = 2 * config.d_model * config.padded_vocab_size
    return num_rounds * round_flops(config, length) + once * block_flops(config, length) + output


def train_flops(config: DeepLoopConfig, num_rounds: int | None = None, length: int | None = None) -> int:
    """Forward and backward through all rounds, per token. What recomputation does again is not counted, as in MFU."""
    return (1 + BACKWARD_PER_FORWARD) * forward_flops(config, num_rounds, length)
