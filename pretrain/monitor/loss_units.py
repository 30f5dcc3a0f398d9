"""A loss in nats per token, told in other units."""

from __future__ import annotations

import math
from collections.abc import Mapping


def perplexity(nats: float) -> float:
    """e to the loss; infinity where that is no float any more."""
    return math.exp(nats) if nats < 700 else math.inf if nats == nats else nats


def bits_per_byte(nats: float, bytes_per_token: float) -> float:
    """Bits over the UTF-8 bytes of text that a token stands for on average; comparable across tokenizers."""
    return nats / math.log(2) / bytes_per_token


def in_other_units(nats: float, bytes_per_token: float | None) -> dict[str, float]:
    """`perplexity`, and `bits_per_byte` where the dataset knows its bytes."""
    units = {"perplexity": perplexity(nats)}
    return units if bytes_per_token is None else units | {"bits_per_byte": bits_per_byte(nats, bytes_per_token)}


def mixed_bytes_per_token(of_sources: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Of a mixture whose shares of the tokens are `weights`; None where one source does not know."""
    total = 0.0
    for name, weight in weights.items():
        known = of_sources.get(name)
        if known is None:
            return None
        total += weight * known
    return total
