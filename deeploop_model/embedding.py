"""The token matrix.

Shape suffixes: B batch, T time, D d_model, V stored vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, and with tied embeddings the output matrix as well.

    Both uses are calls of the module: ZeRO-3 gathers the weights of a module when it is called, and only then, also
    where the backward pass computes something again.
    """

    def forward(self, x: Tensor, *, as_logits: bool = False) -> Tensor:
        """Vectors [B, T, D] of token ids [B, T]; or logits [B, T, V] of the stream [B, T, D]."""
        return F.linear(x, self.weight) if as_logits else super().forward(x)
