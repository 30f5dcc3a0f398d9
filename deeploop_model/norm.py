"""RMSNorm, and the precision that the stream keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        return F.rms_norm(x, self.weight.shape, self.visited.cast(self.weight, x.dtype), self.eps)
