"""States between rounds: had again bit by bit from 16-bit changes, and as precise as unrounded ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.round_states import RoundStates, with_gradient_of


def walked(size: float, *, offload: bool = False) -> tuple[RoundStates, list[torch.Tensor]]:
    """Nine rounds that each change a stream of unit RMS and width 64 by `size`, one token by nothing."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 5, 64, generator=generator)
    states = RoundStates(given, rounded=True, offload=offload)
    x, seen = states.start(given), []
    assert (x - given).abs().max() <= 2**-20
    for _ in range(9):
        seen.append(x)
        change = size * torch.randn(x.shape, generator=generator)
        change[0, 2] = 0
        x = states.advance(x + change, keep=True)
        error = (x - (seen[-1] + change)).abs()
        # This round's rounding, and what the one before left over.
        largest = change.abs().amax() + x.abs().amax() * 2**-10
        assert error.max() <= 2 * 2**-12 * 2 * largest + 2**-19
    assert (x[0, 2] - seen[0][0, 2]).abs().max() == 0
    return states, seen


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("offload", [False, True])
def test_every_state_can_be_had_again_in_any_order(size: float, offload: bool) -> None:
    states, seen = walked(size, offload=offload)
    for place in (8, 7, 3, 4, 0, 8, 1):
        assert torch.equal(states.before(place), seen[place])


def test_states_past_the_scale_come_back_to_the_last_digit() -> None:
    """Without norms after the visits a stream can grow: here to some hundreds, past 32."""
    states, seen = walked(100.0)
    largest = max(x.abs().max() for x in seen)
    assert largest > 300
    for place in (8, 4, 0):
        assert (states.before(place) - seen[place]).abs().max() <= 9 * 2**-24 * largest


def test_gradients_pass_rounding_and_stand_ins_unchanged() -> None:
    x = torch.randn(1, 3, 8, requires_grad=True)
    states = RoundStates(x, rounded=True)
    start = states.start(x)
    stand_in = with_gradient_of(start, start.new_zeros(()).expand(start.shape))
    assert stand_in.untyped_storage().nbytes() == 4
    y = states.advance(2 * with_gradient_of(stand_in, states.before(0)), keep=True)
    weights = torch.randn(1, 3, 8)
    (y * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * weights)


@pytest.mark.parametrize("residual", ["deeploop", "deepnorm", "pre_ln"])
def test_the_loop_travels_as_it_does_in_float64(residual: Any) -> None:
    """At R = 128 a DeepLoop round moves the stream by less than a 16-bit number of its size can show."""
    config = DeepLoopConfig(
        num_blocks=1, num_rounds=128, d_model=64, num_heads=4, vocab_size=100, context_length=16, residual=residual
    )
    low = DeepLoopModel(config, seed=3).bfloat16()
    exact = copy.deepcopy(low).double()
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    moved = []
    with torch.no_grad():
        for model in (low, exact):
            sequence = model.sequence(tokens)
            start = model.enter(tokens, sequence)
            moved.append((model.loop(start, sequence, 128) - start).double())
    assert (moved[0] - moved[1]).norm() < 0.006 * moved[1].norm()
