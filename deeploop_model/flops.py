"""Floating-point operations of a forward pass, by the rounds that it really runs.

A multiply-add counts as 2. Counted are the matrix products: projections, feed-forward, attention, the injection's
adapter, the output matrix (with the padding of the vocabulary, which is computed too). Norms, activations, rotations
and look-ups are not counted; at d = 1024 they are under 1 %.

Attention counts all T x T pairs, 4*T*d per token and visit, as PyTorch's and DeepSpeed's counters do; a kernel that
skips the masked half does half of it.
"""

from __future__ import annotations

from deeploop_model.config import DeepLoopConfig
from deeploop_model.recompute import Recompute
from deeploop_model.round_loss import RoundLoss, round_weights

BACKWARD_PER_FORWARD = 2
"""Each matrix product of the forward pass has two of its size in the backward pass: by its weight, by its input."""


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
    prelude = config.num_prelude_blocks * block_flops(config, length)
    return prelude + num_rounds * round_flops(config, length) + read_out_flops(config, length)


def read_out_flops(config: DeepLoopConfig, length: int) -> int:
    """Logits from the stream after a round: coda and output matrix, per token."""
    return config.num_coda_blocks * block_flops(config, length) + 2 * config.d_model * config.padded_vocab_size


def train_flops(
    config: DeepLoopConfig,
    num_rounds: int | None = None,
    length: int | None = None,
    *,
    backprop_rounds: int | None = None,
    round_loss: RoundLoss = "last",
) -> int:
    """Forward and backward of one training step, per token, as the model's `forward` runs them.

    Rounds before the last `backprop_rounds` have no backward pass; every round that `round_loss` reads out has a read
    out of its own. What recomputation does again is not counted, as in MFU; frozen weights are counted like others.
    """
    num_rounds = config.num_rounds if num_rounds is None else num_rounds
    length = config.context_length if length is None else length
    read_outs = sum(weight > 0 for weight in round_weights(round_loss, num_rounds, backprop_rounds))
    differentiated = num_rounds if backprop_rounds is None else min(num_rounds, backprop_rounds)
    whole = forward_flops(config, differentiated, length) + (read_outs - 1) * read_out_flops(config, length)
    return (1 + BACKWARD_PER_FORWARD) * whole + (num_rounds - differentiated) * round_flops(config, length)


def recompute_flops(
    config: DeepLoopConfig,
    recompute: str,
    num_rounds: int | None = None,
    length: int | None = None,
    *,
    backprop_rounds: int | None = None,
    round_loss: RoundLoss = "last",
) -> int:
    """What recomputation does again in one training step, per token: with `train_flops`, what the hardware does.

    Every visit that is differentiated runs forward once more, twice under `nested` but for a round's last block, not
    at all under `none` and `selective`. Read-outs before the last run once more under each policy but `none`, their
    loss with its gradients.
    """
    policy = Recompute.parse(recompute)
    if policy.kind == "none":
        return 0
    num_rounds = config.num_rounds if num_rounds is None else num_rounds
    length = config.context_length if length is None else length
    early_read_outs = sum(weight > 0 for weight in round_weights(round_loss, num_rounds, backprop_rounds)) - 1
    rounds = num_rounds if backprop_rounds is None else min(num_rounds, backprop_rounds)
    block, coda = block_flops(config, length), config.num_coda_blocks

    def again(blocks: int) -> int:
        """Visits of a stack of so many blocks."""
        if policy.kind == "selective":
            return 0
        return blocks + max(0, blocks - 1) if policy.kind == "nested" else blocks

    stacks = again(config.num_prelude_blocks) + rounds * again(config.num_blocks) + again(coda)
    adapters = rounds * (round_flops(config, length) - config.num_blocks * block) if policy.by_rounds else 0
    product = read_out_flops(config, length) - coda * block
    read_out = (coda + again(coda)) * block + (1 + BACKWARD_PER_FORWARD) * product
    return stacks * block + adapters + early_read_outs * read_out
