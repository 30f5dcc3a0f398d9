"""The token matrix.

Shape suffixes: B batch, T time, D d_model, V stored vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deeploop_model.loss_head import Targets, chunked_loss
from deeploop_model.visit_gradients import VisitedWeight


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, and with tied embeddings the output matrix as well.

    Both uses are calls of the module: ZeRO-3 gathers the weights of a module when it is called, and only then, also
    where the backward pass computes something again.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.visited = VisitedWeight()

    def forward(self, x: Tensor, *, as_logits: bool = False, targets: Targets | None = None) -> Any:
        """Vectors [B, T, D] of token ids [B, T]; or logits [B, T, V], or losses, of the stream [B, T, D]."""
        if targets is not None:
            return chunked_loss(x, self.weight, self.visited, targets)
        return self.visited.linear(x, self.weight) if as_logits else super().forward(x)
