"""Bytes that a forward pass keeps for the backward pass, and that decoding keeps per token.

Kept per token by one visit of one block, in elements of the weights' precision (w) and of the stream's (s), with
fused attention:

| kept by                     | elements                                                        |
|-----------------------------|-----------------------------------------------------------------|
| query-key-value product     | input d (w)                                                     |
| QK-norm                     | queries and keys before it (s)                                  |
| attention                   | fused projection (w); placed queries, keys (w); log-sum (fp32)  |
| attention output product    | its input d (w)                                                 |
| each of the two norms       | input d (s)                                                     |
| up, and gate product        | input d (w)                                                     |
| GELU or SwiGLU              | F twice, or F four times (w)                                    |

The loss keeps its gradient by the stream, d (w), whatever the vocabulary, and one gradient of the output matrix in the
stream's precision, which is no matter of tokens and not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from deeploop_model.config import DeepLoopConfig
from deeploop_model.loss_head import CHUNK_ELEMENTS
from deeploop_model.recompute import Recompute

LOG_SUM_BYTES = 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element of weights and stream."""

    weight: int = 2
    stream: int = 4


@dataclass(frozen=True)
class ActivationBytes:
    """Per token, for one sequence position."""

    kept: int
    """Between forward and backward."""
    recomputed: int
    """Held besides, while the largest recomputed part is in its backward pass."""

    @property
    def peak(self) -> int:
        return self.kept + self.recomputed


def norm_bytes(width: int, precision: Precision) -> int:
    return width * precision.stream


def block_bytes(config: DeepLoopConfig, precision: Precision) -> int:
    """Kept by one visit of one block without recomputation, per token."""
    d, w = config.d_model, precision.weight
    keys = config.kv_heads * config.head_dim
    attention = (d + (d + 2 * keys) + (d + keys) + d) * w + LOG_SUM_BYTES * config.num_heads
    if config.qk_norm:
        attention += norm_bytes(d + keys, precision)
    feed_forward = (d + (4 if config.feed_forward == "swiglu" else 2) * config.feed_forward_width) * w
    return attention + feed_forward + 2 * norm_bytes(d, precision)


def injection_bytes(config: DeepLoopConfig, precision: Precision) -> int:
    """Kept by one injection, per token."""
    if config.injection == "none":
        return 0
    norm = norm_bytes(config.d_model, precision) if config.rule.norm == "after" else 0
    return norm + (2 * config.d_model * precision.weight if config.injection == "concat-linear" else 0)


def activation_bytes(
    config: DeepLoopConfig, policy: str, precision: Precision, num_rounds: int | None = None
) -> ActivationBytes:
    """Per token of a training step of `num_rounds` rounds (the config's by default) through loss and all rounds."""
    rounds = config.num_rounds if num_rounds is None else num_rounds
    recompute = Recompute.parse(policy)
    block, injection = block_bytes(config, precision), injection_bytes(config, precision)
    stream = config.d_model * precision.stream
    prelude, coda = config.num_prelude_blocks, config.num_coda_blocks
    # One norm at the start or the end, and the loss.
    ends = norm_bytes(config.d_model, precision) + config.d_model * precision.weight
    visits = prelude + config.num_blocks * rounds + coda
    if recompute.kind == "none":
        return ActivationBytes(ends + visits * block + rounds * injection, 0)
    if recompute.kind == "selective":
        products = product_bytes(config, precision)
        return ActivationBytes(ends + visits * (stream + products) + rounds * injection, block - products)
    if recompute.kind == "block":
        return ActivationBytes(ends + visits * stream + rounds * injection, block)
    parts = (prelude > 0) + (coda > 0)
    # What enters the loop is injected; unless states are rounded, it is the first of them as well.
    parts += config.injection != "none" and precision.weight == 2
    kept = ends + parts * stream + states_bytes(config, recompute, precision, rounds)
    together = min(recompute.segment, rounds)
    if recompute.kind == "nested":
        return ActivationBytes(kept, max(config.num_blocks, prelude, coda) * stream + injection + block)
    largest = max(together * (config.num_blocks * block + injection), prelude * block, coda * block)
    return ActivationBytes(kept, largest)


def step_bytes(
    config: DeepLoopConfig, policy: str, tokens: int, precision: Precision, num_rounds: int | None = None
) -> int:
    """The most that a training step of `tokens` tokens has allocated at once, weights and their `.grad` left out.

    That is either in the loss, with a chunk of logits in both precisions and the gradient of the output matrix, or
    within the backward pass, with what a recomputed part holds and the sums of the loop's gradients.
    """
    per_token = activation_bytes(config, policy, precision, num_rounds)
    matrix = config.padded_vocab_size * config.d_model
    chunk = min(tokens, max(1, CHUNK_ELEMENTS // config.padded_vocab_size))
    in_loss = tokens * per_token.kept + matrix * (precision.stream + precision.weight)
    in_loss += chunk * config.padded_vocab_size * (precision.stream + precision.weight)
    keys = config.kv_heads * config.head_dim
    block = 2 * config.d_model * (config.d_model + keys)
    block += (3 if config.feed_forward == "swiglu" else 2) * config.d_model * config.feed_forward_width
    sums = config.num_blocks * block + matrix  # those of prelude and coda are not alive together with these
    # Gradients of the stream; and where states are had again from their changes, more of them meanwhile.
    streams = 5 if Recompute.parse(policy).by_rounds else 2
    in_last_round = tokens * (per_token.peak + streams * config.d_model * precision.stream) + sums * precision.weight
    rounds = config.num_rounds if num_rounds is None else num_rounds
    if rounds == 1:
        return max(in_loss, in_last_round)
    # A second gradient makes a sum in the stream's precision; by then what one round kept is free.
    freed = per_token.kept - activation_bytes(config, policy, precision, rounds - 1).kept
    in_round_before = in_last_round - tokens * freed + sums * (precision.stream - precision.weight)
    return max(in_loss, in_last_round, in_round_before)


def states_bytes(config: DeepLoopConfig, recompute: Recompute, precision: Precision, rounds: int) -> int:
    """Of the stream between rounds that are computed again as a whole, see `deeploop_model.round_states`."""
    d, groups = config.d_model, -(-rounds // recompute.segment)
    # The final norm keeps the last state anyhow, and so does a coda.
    own_last = config.rule.norm == "after" and config.num_coda_blocks == 0
    if precision.weight > 2 or rounds == 1:
        return (groups + own_last) * d * precision.stream
    if recompute.segment > 1:
        return (2 * groups - 1 + own_last) * d * precision.stream
    return rounds * 2 * d + own_last * d * precision.stream


def product_bytes(config: DeepLoopConfig, precision: Precision) -> int:
    """Outputs of the matrix products and of attention in one visit of one block, per token."""
    d, keys = config.d_model, config.kv_heads * config.head_dim
    up = (2 if config.feed_forward == "swiglu" else 1) * config.feed_forward_width
    return (d + 2 * keys + d + d + up + d) * precision.weight + LOG_SUM_BYTES * config.num_heads


def kv_cache_bytes(config: DeepLoopConfig, bytes_per_element: int, num_rounds: int | None = None) -> int:
    """Keys and values per token: one slot per block and round, since every visit has keys of its own."""
    rounds = config.num_rounds if num_rounds is None else num_rounds
    visits = config.num_prelude_blocks + config.num_blocks * rounds + config.num_coda_blocks
    return visits * 2 * config.kv_heads * config.head_dim * bytes_per_element
