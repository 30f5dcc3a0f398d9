"""Causal self-attention: grouped queries, optional QK-norm.

Shape suffixes: B batch, T time, D d_model, H query heads, G key-value heads, C head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deeploop_model.config import DeepLoopConfig
from deeploop_model.kv_cache import CacheSlot
from deeploop_model.norm import RMSNorm, stream_dtype
from deeploop_model.rotary import rotate
from deeploop_model.sequence import SequenceContext
from deeploop_model.visit_gradients import Linear


class Attention(nn.Module):
    """Causal self-attention without biases.

    Each of the G key-value heads serves H/G query heads in a row (grouped-query attention, Ainslie et al. 2023,
    arXiv:2305.13245); G = H is multi-head, G = 1 multi-query attention. With `qk_norm` queries and keys are
    normalised per head, before the rotation, with weights that the heads share (Henry et al. 2020, arXiv:2010.04245,
    with RMSNorm).
    """

    def __init__(self, config: DeepLoopConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.num_heads
        # One matrix product for query, key and value; the initialiser treats its three row blocks as three matrices.
        self.qkv_rows = [heads * config.head_dim for heads in (config.num_heads, config.kv_heads, config.kv_heads)]
        self.qkv = Linear(config.d_model, sum(self.qkv_rows))
        self.output = Linear(config.d_model, config.d_model)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, sequence: SequenceContext, slot: CacheSlot | None = None) -> Tensor:
        """The branch; with a slot of a key-value cache, earlier tokens are those in it, and these are added."""
        q_BHTC, k_BGTC, v_BGTC = self.heads(x_BTD, sequence)
        if slot is not None:
            k_BGTC, v_BGTC = slot.extended(k_BGTC, v_BGTC)
        y_BHTC = F.scaled_dot_product_attention(
            q_BHTC,
            k_BGTC,
            v_BGTC,
            attn_mask=sequence.mask_B1TT,
            is_causal=sequence.mask_B1TT is None,
            enable_gqa=self.grouped,
        )
        return self.output(y_BHTC.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def heads(self, x_BTD: Tensor, sequence: SequenceContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, C] and keys [B, G, T, C] as they enter the dot product, and values [B, G, T, C]."""
        q_BHTC, k_BGTC, v_BGTC = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x_BTD).split(self.qkv_rows, dim=-1)
        )
        return (
            self.placed(q_BHTC, self.query_norm, sequence),
            self.placed(k_BGTC, self.key_norm, sequence),
            v_BGTC,
        )

    def placed(self, x_BHTC: Tensor, norm: RMSNorm | None, sequence: SequenceContext) -> Tensor:
        """Queries or keys as they enter the dot product: normalised, then rotated by their positions."""
        dtype = x_BHTC.dtype
        if norm is not None:
            x_BHTC = norm(x_BHTC.to(stream_dtype(x_BHTC)))
        if sequence.rotary is not None:
            x_BHTC = rotate(x_BHTC, sequence.rotary)
        return x_BHTC.to(dtype)
