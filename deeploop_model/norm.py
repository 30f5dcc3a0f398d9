"""RMSNorm, and the precision that the stream keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deeploop_model.visit_gradients import VisitedWeight


def stream_dtype(weight: Tensor) -> torch.dtype:
    """The stream's precision: float64 for a float64 model, otherwise float32, whatever the weights are.

    A DeepLoop branch starts at 1/(4N) of the skip. In bf16 (8 significant bits) alpha*x + f(x) would round away most
    of it at N = 8, and all of it at N = 128.
    """
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the precision of x (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.visited = VisitedWeight()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.visited.cast(self.weight, x.dtype)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return _FewPasses.apply(x, weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]
        normed: Tensor = F.rms_norm(x, weight.shape, weight, self.eps)
        return normed


class _FewPasses(torch.autograd.Function):
    """The same for CPUs, where PyTorch has no kernel for it and makes a pass over memory for every operation.

    Three times as fast, and keeps x only. The backward pass is that of LayerNorm with a mean of zero, which takes the
    mean m of the gradient times the weight from it; that comes back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, needed = gradient.contiguous(), [True, True, False]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, torch.zeros_like(scale), scale, weight, None, needed
        )
        mean = (gradient @ weight).unsqueeze(-1).div_(len(weight))
        return grad_x.add_(mean.mul_(scale)), grad_weight, None
