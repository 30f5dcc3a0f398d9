"""The stream between rounds: carried exactly, kept for the backward pass in 16 bits an element.

With 16-bit weights a round's change is rounded to 16 bits, whatever the recompute policy, and added to the state:

    x_{r+1} = x_r + d_r,    d_r = fp16(f(x_r) - x_r), scaled per token,    f one round

Keeping d_1..d_R and the last state is enough: x_r = x_{r+1} - d_r, bit by bit, because states are carried in float64
and all d are multiples of 2^-36. A recomputed round starts from exactly what it started from.

Why the change and not the state: a DeepLoop round changes the stream by a part of about 1/(2R), less than a 16-bit
number of the stream's size can show. Error of the distance travelled through all rounds, bf16 weights at
initialisation, width 128, relative to that distance in float64:

| K, R, rule         | 1, 128, deeploop | 4, 8, deeploop | 1, 128, deepnorm | 2, 64, pre_ln |
|--------------------|------------------|----------------|------------------|---------------|
| nothing rounded    | 0.0025           | 0.0024         | 0.0006           | 0.0026        |
| change in fp16     | 0.0025           | 0.0024         | 0.0006           | 0.0028        |
| state in fp16      | 0.89             | 0.26           | 0.013            | 0.0033        |
| state in bf16      | 1.01             | 0.89           | 0.25             | 0.021         |

The rounding's gradient is taken as 1. With float32 or float64 weights nothing is rounded, and states are kept whole.

Shape suffixes: B batch, T time, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop_model.recompute import recomputed, to_host

SMALLEST_EXPONENT = -12
"""Of a token's scale. fp16 goes down to 2^-24 of it: multiples of 2^-36, exact in float64 for a stream up to 2^16."""


class RoundStates:
    """The states of one forward pass, from the one that enters the first round.

    Args:
        start_BTD: that state, in the stream's precision, or float64 where another object's `now` goes on.
        dtype: of the stream.
        rounded: whether changes are rounded to 16 bits.
        offload: whether kept states are in the host's memory.
    """

    def __init__(self, start_BTD: Tensor, dtype: torch.dtype, *, rounded: bool, offload: bool = False) -> None:
        self.rounded = rounded
        self._dtype = dtype
        self._offload = offload
        self._place = 0
        self._changes: list[tuple[Tensor, Tensor]] = []
        self._whole: list[Tensor] = []
        self.now = start_BTD.detach().double() if rounded else start_BTD.detach()
        """The state at the present place; nobody writes into it."""

    def going_on(self, now_BTD: Tensor) -> RoundStates:
        """Others of the same kind, from this state on; they keep nothing of their own."""
        return RoundStates(now_BTD, self._dtype, rounded=self.rounded)

    def advance(self, y_BTD: Tensor, *, keep: bool) -> Tensor:
        """The state after a round that gave y; with `keep` the state before it can be had again."""
        if self.rounded:
            return _Advance.apply(y_BTD, self, keep)  # type: ignore[no-any-return, no-untyped-call]
        if keep:
            self._whole.append(self._stored(self.now))
            self._place += 1
        self.now = y_BTD.detach()
        return y_BTD

    def again(self, link_BTD: Tensor, place: int) -> Tensor:
        """The state before the kept round number `place` (from 0). Its gradient goes to the link."""
        return _Again.apply(link_BTD, self, place)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def num_kept(self) -> int:
        return len(self._changes) + len(self._whole)

    def at(self, place: int) -> Tensor:
        """The state before the kept round number `place`, in the stream's precision."""
        if not self.rounded:
            return self._whole[place].to(self.now.device) if place < len(self._whole) else self.now
        while self._place > place:
            self._place -= 1
            self.now = self.now - self._change(self._place)
        while self._place < place:
            self.now = self.now + self._change(self._place)
            self._place += 1
        return self.now.to(self._dtype)

    def take_change(self, y_BTD: Tensor, keep: bool) -> Tensor:
        change_BTD = y_BTD.double() - self.now
        exponent_BT1 = torch.frexp(change_BTD.abs().amax(-1, keepdim=True)).exponent.clamp(min=SMALLEST_EXPONENT)
        scale_BT1 = torch.exp2(exponent_BT1.float())
        packed = (change_BTD / scale_BT1).half(), scale_BT1
        self.now = self.now + _unpacked(*packed)
        if keep:
            self._changes.append((self._stored(packed[0]), self._stored(packed[1])))
            self._place += 1
        return self.now.to(self._dtype)

    def _change(self, place: int) -> Tensor:
        packed, scale = (part.to(self.now.device, non_blocking=True) for part in self._changes[place])
        return _unpacked(packed, scale)

    def _stored(self, tensor: Tensor) -> Tensor:
        return to_host(tensor) if self._offload else tensor


def recomputed_rounds(
    states: RoundStates, step: Callable[[int, Tensor], Tensor], group: Sequence[int], x_BTD: Tensor
) -> list[Tensor]:
    """The streams after each round r of the group, `step(r, x)`, which the backward pass computes again together."""
    stand_in_BTD = link(x_BTD)
    if len(group) == 1:
        place = states.num_kept
        y_BTD = recomputed(lambda link_BTD: step(group[0], states.again(link_BTD, place)))(stand_in_BTD)
        return [states.advance(y_BTD, keep=True)]
    start_BTD = states.now

    def run(link_BTD: Tensor) -> tuple[Tensor, ...]:
        own = states.going_on(start_BTD)
        x_BTD, streams = own.again(link_BTD, 0), []
        for r in group:
            x_BTD = own.advance(step(r, x_BTD), keep=False)
            streams.append(x_BTD)
        return (*streams, own.now)

    *streams, states.now = recomputed(run)(stand_in_BTD)
    return list(streams)


def link(x_BTD: Tensor) -> Tensor:
    """A stand-in for x in the graph: its shape and gradient, no storage."""
    return _Link.apply(x_BTD)  # type: ignore[no-any-return, no-untyped-call]


def _unpacked(change_BTD: Tensor, scale_BT1: Tensor) -> Tensor:
    return change_BTD.double() * scale_BT1


class _Advance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BTD: Tensor, states: RoundStates, keep: bool) -> Tensor:
        return states.take_change(y_BTD, keep)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link_BTD: Tensor, states: RoundStates, place: int) -> Tensor:
        return states.at(place).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor) -> Tensor:
        return x_BTD.new_zeros(()).expand(x_BTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
