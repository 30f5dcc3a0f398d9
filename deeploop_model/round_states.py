"""The stream between rounds: carried exactly, kept for the backward pass in 16 bits an element.

With 16-bit weights and more than one round, a round's change is rounded to fp16, whatever the recompute policy, and
added to the state; what the rounding left over joins the next round's change, so that it doesn't add up over rounds:

    c_r = f(x_r) - x_r + e_r,    d_r = fp16(c_r / S),    x_{r+1} = x_r + S d_r,    e_{r+1} = c_r - S d_r

with f one round, e_1 = 0 and S a power of two of 4 sqrt(D) or more. Keeping d_1..d_R and the last state is enough:
x_r = x_{r+1} - S d_r. fp16 has no digits below 2^-24, so all terms are multiples of S 2^-24, of which float32 adds and
subtracts any below S exactly: a recomputed round starts bit by bit from what it started from. A stream of unit RMS
stays below S; without norms after the visits single elements may grow past it, and come back with an error of float32's
last digit for each round walked back.

Why the change and not the state: a DeepLoop round changes the stream by a part of about 1/(2R), less than a 16-bit
number of the stream's size can show. Error of the distance travelled through all rounds, bf16 weights at
initialisation, width 128, relative to that distance in float64 (`python -m benchmarks.many_rounds states`):

| K, R, rule         | 1, 128, deeploop | 4, 8, deeploop | 1, 128, deepnorm | 2, 64, pre_ln |
|--------------------|------------------|----------------|------------------|---------------|
| nothing rounded    | 0.0025           | 0.0024         | 0.0006           | 0.0033        |
| change in fp16     | 0.0024           | 0.0024         | 0.0006           | 0.0032        |
| state in fp16      | 0.89             | 0.29           | 0.012            | 0.0038        |
| state in bf16      | 1.00             | 0.83           | 0.25             | 0.022         |

The rounding's gradient is taken as 1. With float32 or float64 weights nothing is rounded, and states are kept whole.

Shape suffixes: B batch, T time, D d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop_model.recompute import recomputed, to_host

SMALLEST_FP16 = 2.0**-24


class RoundStates:
    """The states of one forward pass, from the one that enters the first round.

    Args:
        start_BTD: that state.
        rounded: whether changes are rounded to 16 bits.
        offload: whether kept states are in the host's memory.
    """

    def __init__(self, start_BTD: Tensor, *, rounded: bool, offload: bool = False) -> None:
        self.rounded = rounded
        self._scale = 2.0 ** math.ceil(math.log2(4 * math.sqrt(start_BTD.shape[-1])))
        self._offload = offload
        self._place = 0
        self._kept: list[Tensor] = []  # changes, or whole states where nothing is rounded
        self.now = start_BTD.detach()
        """The state at the present place; nobody writes into it."""
        self.left_over: Tensor | None = None
        """By the last rounding."""

    def start(self, x_BTD: Tensor) -> Tensor:
        """The state that enters the first round, for the stream that was given."""
        if not self.rounded:
            return x_BTD
        step = self._scale * SMALLEST_FP16
        self.now = torch.mul(self.now, 1 / step).round_().mul_(step)
        return with_gradient_of(x_BTD, self.now)

    def advance(self, y_BTD: Tensor, *, keep: bool) -> Tensor:
        """The state after a round that gave y; with `keep` the state before it can be had again."""
        kept = self.now
        if self.rounded:
            change_BTD = y_BTD.detach() - self.now
            if self.left_over is not None:
                change_BTD += self.left_over
            kept = (change_BTD / self._scale).half()
            self.now = torch.add(self.now, kept, alpha=self._scale)
            self.left_over = change_BTD.sub_(kept, alpha=self._scale)
            y_BTD = with_gradient_of(y_BTD, self.now)
        else:
            self.now = y_BTD.detach()
        if keep:
            self._kept.append(self.stored(kept))
            self._place += 1
        return y_BTD

    def going_on(self, now_BTD: Tensor, left_over_BTD: Tensor | None) -> RoundStates:
        """Others of the same kind from a state on; they keep nothing of their own."""
        others = RoundStates(now_BTD.to(self.now.device, non_blocking=True), rounded=self.rounded)
        if left_over_BTD is not None:
            others.left_over = left_over_BTD.to(self.now.device, non_blocking=True)
        return others

    def stored(self, tensor: Tensor) -> Tensor:
        """A tensor of these states where it is kept."""
        return to_host(tensor) if self._offload else tensor

    def end(self) -> None:
        """No round follows: what the last rounding left over is not needed."""
        self.left_over = None

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def before(self, place: int) -> Tensor:
        """The state before the kept round number `place`, from 0."""
        if not self.rounded:
            return self._fetched(place) if place < self.num_kept else self.now
        while self._place > place:
            now = torch.sub(self.now, self._fetched(self._place - 1), alpha=self._scale)
            self.now, self._place = now, self._place - 1
        while self._place < place:
            now = torch.add(self.now, self._fetched(self._place), alpha=self._scale)
            self.now, self._place = now, self._place + 1
        return self.now

    def _fetched(self, place: int) -> Tensor:
        return self._kept[place].to(self.now.device, non_blocking=True)


def recomputed_rounds(
    states: RoundStates, step: Callable[[int, Tensor], Tensor], group: Sequence[int], x_BTD: Tensor
) -> list[Tensor]:
    """The streams after each round r of the group, `step(r, x)`, which the backward pass computes again together.

    The graph refers to x by a stand-in without storage: the states are kept here, and not by autograd as well.
    """
    stand_in_BTD = with_gradient_of(x_BTD, x_BTD.new_zeros(()).expand(x_BTD.shape))
    if len(group) == 1:
        place = states.num_kept
        y_BTD = recomputed(lambda x_BTD: step(group[0], with_gradient_of(x_BTD, states.before(place))))(stand_in_BTD)
        return [states.advance(y_BTD, keep=True)]
    start_BTD = states.stored(states.now)
    left_over_BTD = None if states.left_over is None else states.stored(states.left_over)
    again = False

    def run(x_BTD: Tensor) -> tuple[Tensor, ...]:
        nonlocal again
        own = states.going_on(*((start_BTD, left_over_BTD) if again else (states.now, states.left_over)))
        x_BTD, streams = with_gradient_of(x_BTD, own.now), []
        for r in group:
            x_BTD = own.advance(step(r, x_BTD), keep=False)
            streams.append(x_BTD)
        if not again:
            states.now, states.left_over, again = own.now, own.left_over, True
        return tuple(streams)

    return list(recomputed(run)(stand_in_BTD))


def with_gradient_of(x_BTD: Tensor, value_BTD: Tensor) -> Tensor:
    """The value, whose gradient goes to x."""
    return _WithGradientOf.apply(x_BTD, value_BTD)  # type: ignore[no-any-return, no-untyped-call]


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, value_BTD: Tensor) -> Tensor:
        return value_BTD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
