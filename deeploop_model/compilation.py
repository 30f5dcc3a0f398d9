"""One compiled block for all K*R visits: `torch.compile` of the block's forward pass, weights as inputs.

The first visit is compiled, every other one runs the same code; so compile time is that of one block whatever K and R
are. Compiled again is what differs in kind: another shape or precision, without gradients (validation, rounds cut from
back-propagation), other frozen weights, another alpha. PyTorch stops at eight of these in a process; one that builds
many models calls `torch.compiler.reset()` between them. Gradients go to the visits' sums out of the compiled backward
pass (`deeploop_model.visit_gradients`).

Only visits without a key-value cache are compiled: decoding changes shapes with every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from deeploop_model.sequence import SequenceContext

BlockStep = Callable[[nn.Module, Tensor, SequenceContext], Tensor]


def missing_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device; None where it can."""
    if device.type != "cpu":
        return None if has_triton() else "Triton is not installed, which compiles for the GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found; install g++ or clang++, or name one in the environment variable CXX"
    return None


@functools.cache
def compiled_block(backend: str | Callable[..., object] = "inductor") -> BlockStep:
    """The step of any block, compiled at its first call for each shape, precision and kind of block."""

    def block_step(block: nn.Module, x_BTD: Tensor, sequence: SequenceContext) -> Tensor:
        return block(x_BTD, sequence)  # type: ignore[no-any-return]

    return torch.compile(block_step, backend=backend, fullgraph=True, dynamic=False)
