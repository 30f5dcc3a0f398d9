"""The residual rule: how a visit adds its branch to the stream, and how the branch is initialised.

A visit is one sub-layer (attention or feed-forward) of one block in one round. P prelude blocks, K looped blocks run
R rounds and C coda blocks have unrolled depth N = P + K*R + C and M = 2N visits, each

    x <- RMSNorm(alpha*x + f(x))        norm after (Post-LN, DeepNorm form: Wang et al. 2022, arXiv:2203.00555)
    x <- x + f(RMSNorm(x))              norm before (Pre-LN; one more norm follows the last visit)

alpha acts at run time. beta is an initialisation gain only, for the value, attention-output and feed-forward
matrices; query and key keep gain 1, and so does the gate of a SwiGLU feed-forward (see `deeploop_model.init`).

| rule        | alpha      | beta        | norm   |
|-------------|------------|-------------|--------|
| deeploop    | (2N)^(1/2) | (8N)^(-1/2) | after  |
| deepnorm    | (2N)^(1/4) | (8N)^(-1/4) | after  |
| {p, c, d}   | (cN)^p     | (dN)^(-p)   | after  |
| post_ln     | 1          | 1           | after  |
| pre_ln      | 1          | 1           | before |

One alpha and one beta serve all visits, those of prelude and coda too: a change of any branch reaches the output
through the skips of the visits after it, so that what has to stay bounded is one sum over the M visits of one stream.
A prelude or coda block is visited once, so its weights' changes don't add up over rounds and it alone could bear a
larger beta/alpha; a second pair of constants would buy nothing and would break the equality of a loop with the
unrolled stack. Input injection and embeddings add no branch that beta scales and are not counted.

N is that of training: `num_rounds` of the config. Where the number of rounds is sampled in training or changed
afterwards, alpha stays that of `num_rounds`, which should therefore be the mean number of rounds or more.

pre_ln divides the two output matrices (attention output, feed-forward output) by sqrt(2N), as GPT-2 does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deeploop_model.errors import ModelConfigError

RuleName = Literal["deeploop", "deepnorm", "post_ln", "pre_ln"]


@dataclass(frozen=True)
class ExponentRule:
    """alpha = (c*N)^p and beta = (d*N)^(-p), norm after."""

    p: float
    c: float = 2.0
    d: float = 8.0

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("d", self.d)):
            if not (math.isfinite(value) and value > 0):
                raise ModelConfigError(f"residual.{name}: {value} must be a positive number")
        if not (math.isfinite(self.p) and self.p >= 0):
            raise ModelConfigError(f"residual.p: {self.p} must be 0 or more")


@dataclass(frozen=True)
class ResidualRule:
    """What a rule means at one unrolled depth N.

    `output_gain` multiplies the attention-output and feed-forward output matrices at initialisation, on top of
    `beta`; it differs from 1 only for pre_ln.
    """

    alpha: float
    beta: float
    norm: Literal["after", "before"]
    output_gain: float = 1.0


DEEPLOOP = ExponentRule(p=1 / 2)
DEEPNORM = ExponentRule(p=1 / 4)


def residual_rule(residual: RuleName | ExponentRule, unrolled_depth: int) -> ResidualRule:
    """The rule for unrolled depth N (the N of training, whatever number of rounds runs later)."""
    if residual == "post_ln":
        return ResidualRule(alpha=1.0, beta=1.0, norm="after")
    if residual == "pre_ln":
        return ResidualRule(alpha=1.0, beta=1.0, norm="before", output_gain=(2 * unrolled_depth) ** -0.5)
    if residual == "deeploop":
        residual = DEEPLOOP
    elif residual == "deepnorm":
        residual = DEEPNORM
    elif not isinstance(residual, ExponentRule):
        raise ModelConfigError(
            f"residual: {residual!r} is unknown; use deeploop, deepnorm, post_ln, pre_ln or {{p: NUMBER}}"
        )
    try:
        alpha = (residual.c * unrolled_depth) ** residual.p
        beta = (residual.d * unrolled_depth) ** -residual.p
    except OverflowError:
        raise ModelConfigError(
            f"residual.p: {residual.p} makes alpha or beta too large a number at N = {unrolled_depth}"
        ) from None
    return ResidualRule(alpha=alpha, beta=beta, norm="after")
