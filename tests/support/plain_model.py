"""The looped model once more, slow and plain: NumPy, float64, a loop over every visit, head and position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deeploop_model import DeepLoopConfig

Array = NDArray[np.float64]


def plain_logits(weights: dict[str, Tensor], config: DeepLoopConfig, tokens: list[int], num_rounds: int) -> Array:
    """Logits [T, vocab_size] of one sequence. `weights` is the model's state dict."""
    w = {name: tensor.detach().double().numpy() for name, tensor in weights.items()}
    alpha, _, place = _rule(config)
    stream = [w["embedding.weight"][token] for token in tokens]
    if place == "after":
        stream = [_rms(x, w["embedding_norm.weight"], config.norm_eps) for x in stream]
    for _round in range(num_rounds):
        for k in range(config.num_blocks):
            for branch in ("attention", "feed_forward"):
                gain = w[f"blocks.{k}.{branch}_norm.weight"]
                if place == "after":
                    update = _branch(branch, w, k, stream, config)
                    stream = [_rms(alpha * x + f, gain, config.norm_eps) for x, f in zip(stream, update, strict=True)]
                else:
                    update = _branch(branch, w, k, [_rms(x, gain, config.norm_eps) for x in stream], config)
                    stream = [x + f for x, f in zip(stream, update, strict=True)]
    if place == "before":
        stream = [_rms(x, w["final_norm.weight"], config.norm_eps) for x in stream]
    head = w["embedding.weight" if config.tie_embeddings else "head.weight"]
    return np.stack([[float(x @ head[v]) for v in range(config.vocab_size)] for x in stream])


def _rule(config: DeepLoopConfig) -> tuple[float, float, str]:
    n = config.num_blocks * config.num_rounds
    name: Any = config.residual
    table = {
        "deeploop": (math.sqrt(2 * n), 1 / math.sqrt(8 * n), "after"),
        "deepnorm": ((2 * n) ** 0.25, (8 * n) ** -0.25, "after"),
        "post_ln": (1.0, 1.0, "after"),
        "pre_ln": (1.0, 1.0, "before"),
    }
    if isinstance(name, str):
        return table[name]
    return (name.c * n) ** name.p, (name.d * n) ** -name.p, "after"


def _rms(x: Array, gain: Array, eps: float) -> Array:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * gain


def _branch(kind: str, w: dict[str, Array], k: int, stream: list[Array], config: DeepLoopConfig) -> list[Array]:
    if kind == "feed_forward":
        up, down = w[f"blocks.{k}.feed_forward.up.weight"], w[f"blocks.{k}.feed_forward.down.weight"]
        return [down @ np.array([_gelu(float(h)) for h in up @ x]) for x in stream]
    d, width = config.d_model, config.d_model // config.num_heads
    qkv, out = w[f"blocks.{k}.attention.qkv.weight"], w[f"blocks.{k}.attention.output.weight"]
    query, key, value = ([qkv[part * d : (part + 1) * d] @ x for x in stream] for part in range(3))
    result = []
    for t in range(len(stream)):
        heads = []
        for h in range(config.num_heads):
            rows = slice(h * width, (h + 1) * width)
            q = _turn(query[t][rows], t, config.rope_base)
            scores = [float(q @ _turn(key[s][rows], s, config.rope_base)) / math.sqrt(width) for s in range(t + 1)]
            largest = max(scores)
            shares = [math.exp(score - largest) for score in scores]
            heads.append(sum(share * value[s][rows] for s, share in enumerate(shares)) / sum(shares))
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
