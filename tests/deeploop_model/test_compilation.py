"""torch.compile of one block: counted compilations, gradients, and what is said where no compiler exists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.compilation import compiled_block, missing_compiler
from deeploop_model.visit_alignment import measured_visits

TOKENS = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))


def compiled(blocks: int, rounds: int, policy: str, backend: Any) -> DeepLoopModel:
    """alpha is a constant of compiled code: with post_ln it is 1 at every depth."""
    shape: dict[str, Any] = {"d_model": 32, "num_heads": 2, "vocab_size": 50, "context_length": 16}
    config = DeepLoopConfig(num_blocks=blocks, num_rounds=rounds, residual="post_ln", **shape)
    model = DeepLoopModel(config, seed=1, recompute=policy).bfloat16()
    model.block_step = compiled_block(backend)
    return model


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_one_compilation_for_all_visits_and_gradients_as_in_float64() -> None:
    """K, R and the recompute policy change; measuring does too; the second model compiles nothing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    for blocks, rounds, policy in ((1, 2, "round"), (3, 5, "none"), (2, 3, "nested"), (2, 16, "block")):
        model = compiled(blocks, rounds, policy, counter)
        exact = copy.deepcopy(model).double()
        exact.block_step = None
        with measured_visits(model) as alignment:
            model(TOKENS[:, :-1], TOKENS[:, 1:]).loss.backward()
        exact(TOKENS[:, :-1], TOKENS[:, 1:]).loss.backward()
        assert counter.frame_count == 1, (blocks, rounds, policy)
        assert len(alignment.of(alignment.squares())) == 2 * blocks
        for (name, weight), other in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert weight.grad is not None
            assert other.grad is not None
            error = (weight.grad.double() - other.grad).norm() / other.grad.norm()
            assert error < 0.05, (policy, name, float(error))


def test_absent_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert "no C++ compiler was found; install g++" in str(missing_compiler(torch.device("cpu")))
