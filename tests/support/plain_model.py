"""The looped model once more, slow and plain: NumPy, float64, a loop over every visit, head and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deeploop_model import DeepLoopConfig

Array = NDArray[np.float64]
Weights = dict[str, Array]


@dataclass
class Seen:
    """What was met inside of the loop, visit by visit."""

    streams: list[Array] = field(default_factory=list)
    """After each block of each round, [T, D]."""
    scores: list[list[list[Array]]] = field(default_factory=list)
    """Of each block of each round, by position and head: scaled products with the keys that are visible, [S]."""


def plain_logits(
    weights: dict[str, Tensor],
    config: DeepLoopConfig,
    tokens: Sequence[int],
    num_rounds: int,
    documents: Sequence[int] | None = None,
    seen: Seen | None = None,
) -> Array:
    """Logits [T, vocab_size] of one sequence. `weights` is the model's state dict."""
    seen = Seen() if seen is None else seen
    w = {name: tensor.detach().double().numpy() for name, tensor in weights.items()}
    after = config.residual != "pre_ln"
    starts = _document_starts(documents or [0] * len(tokens))
    stream = [w["embedding.weight"][token] for token in tokens]
    if config.position == "learned":
        stream = [x + w["position_embedding.weight"][t - starts[t]] for t, x in enumerate(stream)]
    if after:
        stream = [_rms(x, w["embedding_norm.weight"], config.norm_eps) for x in stream]
    for p in range(config.num_prelude_blocks):
        stream = _block(f"prelude.{p}", w, stream, config, starts, Seen())
    entered = stream
    for r in range(num_rounds):
        stream = [_inject(x, e, w, config) for x, e in zip(stream, entered, strict=True)]
        if config.round_embedding:
            stream = [x + w["round_embedding.weight"][min(r, config.num_rounds - 1)] for x in stream]
        for k in range(config.num_blocks):
            stream = _block(f"blocks.{k}", w, stream, config, starts, seen)
            seen.streams.append(np.stack(stream))
    for c in range(config.num_coda_blocks):
        stream = _block(f"coda.{c}", w, stream, config, starts, Seen())
    if not after:
        stream = [_rms(x, w["final_norm.weight"], config.norm_eps) for x in stream]
    head = w["embedding.weight" if config.tie_embeddings else "head.weight"]
    return np.stack([[float(x @ head[v]) for v in range(config.vocab_size)] for x in stream])


def _document_starts(documents: Sequence[int]) -> list[int]:
    """For every position the first position of its document."""
    starts = [0]
    for t in range(1, len(documents)):
        starts.append(starts[-1] if documents[t] == documents[t - 1] else t)
    return starts


def _block(
    name: str, w: Weights, stream: list[Array], config: DeepLoopConfig, starts: list[int], seen: Seen
) -> list[Array]:
    n = config.num_prelude_blocks + config.num_blocks * config.num_rounds + config.num_coda_blocks
    for branch in ("attention", "feed_forward"):
        gain = w[f"{name}.{branch}_norm.weight"]
        if config.residual == "pre_ln":
            update = _branch(branch, name, w, [_rms(x, gain, config.norm_eps) for x in stream], config, starts, seen)
            stream = [x + f for x, f in zip(stream, update, strict=True)]
        else:
            alpha = _alpha(config.residual, n)
            update = _branch(branch, name, w, stream, config, starts, seen)
            stream = [_rms(alpha * x + f, gain, config.norm_eps) for x, f in zip(stream, update, strict=True)]
    return stream


def _alpha(residual: Any, n: int) -> float:
    if isinstance(residual, str):
        return float({"deeploop": math.sqrt(2 * n), "deepnorm": (2 * n) ** 0.25, "post_ln": 1.0}[residual])
    return float((residual.c * n) ** residual.p)


def _inject(x: Array, e: Array, w: Weights, config: DeepLoopConfig) -> Array:
    if config.injection == "none":
        return x
    mixed = x + e if config.injection == "add" else w["injection.linear.weight"] @ np.concatenate([x, e])
    return mixed if config.residual == "pre_ln" else _rms(mixed, w["injection.norm.weight"], config.norm_eps)


def _rms(x: Array, gain: Array, eps: float) -> Array:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * gain


def _branch(
    kind: str, name: str, w: Weights, stream: list[Array], config: DeepLoopConfig, starts: list[int], seen: Seen
) -> list[Array]:
    if kind == "attention":
        return _attention(f"{name}.attention", w, stream, config, starts, seen)
    up, down = w[f"{name}.feed_forward.up.weight"], w[f"{name}.feed_forward.down.weight"]
    if config.feed_forward == "gelu":
        return [down @ np.array([_gelu(float(h)) for h in up @ x]) for x in stream]
    gate = w[f"{name}.feed_forward.gate.weight"]
    return [
        down @ np.array([g / (1 + math.exp(-g)) * h for g, h in zip(gate @ x, up @ x, strict=True)]) for x in stream
    ]


def _attention(
    name: str, w: Weights, stream: list[Array], config: DeepLoopConfig, starts: list[int], seen: Seen
) -> list[Array]:
    width = config.d_model // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    qkv, out = w[f"{name}.qkv.weight"], w[f"{name}.output.weight"]
    assert len(qkv) == (config.num_heads + 2 * kv_heads) * width

    def head(x: Array, index: int) -> Array:
        """Rows of the fused matrix, head by head: all query heads, then all key heads, then all value heads."""
        return qkv[index * width : (index + 1) * width] @ x

    def placed(x: Array, position: int, kind: str) -> Array:
        if config.qk_norm:
            x = _rms(x, w[f"{name}.{kind}_norm.weight"], config.norm_eps)
        return _turn(x, position, config.rope_base) if config.position == "rope" else x

    result = []
    seen.scores.append([])
    for t in range(len(stream)):
        seen.scores[-1].append([])
        heads = []
        for h in range(config.num_heads):
            shared = h // (config.num_heads // kv_heads)
            q = placed(head(stream[t], h), t, "query")
            scores, values = [], []
            for s in range(starts[t], t + 1):
                k = placed(head(stream[s], config.num_heads + shared), s, "key")
                scores.append(float(q @ k) / math.sqrt(width))
                values.append(head(stream[s], config.num_heads + kv_heads + shared))
            seen.scores[-1][-1].append(np.array(scores))
            largest = max(scores)
            shares = [math.exp(score - largest) for score in scores]
            heads.append(sum(share * v for share, v in zip(shares, values, strict=True)) / sum(shares))
        result.append(out @ np.concatenate(heads))
    return result


def _turn(x: Array, position: int, base: float) -> Array:
    """Pairs (x[i], x[i + width/2]) as complex numbers, turned by position * base^(-2i/width)."""
    half = len(x) // 2
    angle = position * base ** (-2 * np.arange(half) / len(x))
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def _gelu(x: float) -> float:
    """The tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
