"""The output matrix: logits, or the loss straight from the stream, with logits made in chunks of tokens only.

    loss = mean of -log p(target) + z_loss * mean of (log Z)^2,      Z = sum over the vocabulary of exp(logit)

both over kept targets; the second term keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311).

A chunk's gradient by the logits is known as soon as its logits are, so the forward pass computes the gradients by the
stream and by the matrix at once and keeps those, and no logits. The matrix's gradient is summed over chunks, and over
rounds that are read out, in float32.

DeepSpeed has losses in chunks as well: `runtime/chunked_cross_entropy.py` for logits that exist whole, and
`sequence/linear_cross_entropy.py` from the stream, which computes logits again in the backward pass and has no z term.

Shape suffixes: N tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deeploop_model.visit_gradients import Linear, VisitedWeight, VisitSum, add_to, new_entry

IGNORED_TARGET = -100
CHUNK_ELEMENTS = 2**26
"""Logits of a chunk at most: 256 MiB in float32."""


class Targets(NamedTuple):
    """What a loss is computed against."""

    tokens: Tensor
    """int64 ids [B, T]; -100 is left out of the means."""
    vocab_size: int
    """Rows of the matrix past these are padding."""
    dtype: torch.dtype
    """That the softmax is computed in."""
    z_loss: float = 0.0


class Losses(NamedTuple):
    """Scalars."""

    total: Tensor
    cross_entropy: Tensor
    """Without the z term, and without a graph."""


def chunked_loss(x_BTD: Tensor, weight_VD: Tensor, visited: VisitedWeight, targets: Targets) -> Losses:
    """The mean losses of the logits x W^T."""
    visited.enter(weight_VD)
    entry, number = visited.entry, visited.number
    if entry is None and weight_VD.requires_grad and torch.is_grad_enabled():
        entry, number = new_entry(weight_VD)  # outside of a pass
    return Losses(*_ChunkedLoss.apply(x_BTD.flatten(0, -2), weight_VD, entry, number, targets))  # type: ignore[no-untyped-call]


class OutputHead(Linear):
    """An output matrix of its own, without tied embeddings."""

    def forward(self, input: Tensor, targets: Targets | None = None) -> Any:
        """Logits [B, T, V] of the stream [B, T, D], or the losses against targets."""
        return super().forward(input) if targets is None else chunked_loss(input, self.weight, self.visited, targets)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, entry: Tensor | None, number: Tensor | None, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        targets_N = targets.tokens.flatten()
        kept_N = targets_N != IGNORED_TARGET
        share = 1.0 / kept_N.sum().to(targets.dtype)
        grad_x_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        sum_VD = torch.zeros_like(weight_VD, dtype=targets.dtype) if ctx.needs_input_grad[2] else None
        cross_entropy, z = (torch.zeros((), dtype=targets.dtype, device=x_ND.device) for _ in range(2))
        chunk = max(1, CHUNK_ELEMENTS // len(weight_VD))
        logits_NV = p_NV = grad_NV = grad_low_NV = None
        for start in range(0, len(x_ND), chunk):
            del logits_NV, p_NV, grad_NV, grad_low_NV  # one chunk's at a time
            part = slice(start, start + chunk)
            weights_N1 = (kept_N[part] * share).unsqueeze(-1)
            ids_N1 = targets_N[part].clamp(min=0).unsqueeze(-1)
            logits_NV = (x_ND[part] @ weight_VD.t()).to(targets.dtype)
            logits_NV[:, targets.vocab_size :] = -torch.inf  # the matrix's padding
            of_target_N1, largest_N1 = logits_NV.gather(-1, ids_N1), logits_NV.amax(-1, keepdim=True)
            p_NV = logits_NV.sub_(largest_N1).exp_()
            sum_N1 = p_NV.sum(-1, keepdim=True)
            log_z_N1 = largest_N1 + sum_N1.log()
            cross_entropy += ((log_z_N1 - of_target_N1) * weights_N1).sum()
            z += (log_z_N1.square() * weights_N1).sum()
            if grad_x_ND is None and sum_VD is None:
                continue
            # d/dlogits: p (1 + 2 z_loss log Z) - one-hot(target), times the token's share in the mean.
            grad_NV = p_NV.mul_(weights_N1 * (1 + 2 * targets.z_loss * log_z_N1) / sum_N1)
            grad_low_NV = grad_NV.scatter_add_(-1, ids_N1, -weights_N1).to(x_ND.dtype)
            if grad_x_ND is not None:
                torch.mm(grad_low_NV, weight_VD, out=grad_x_ND[part])
            if sum_VD is not None:
                add_to(sum_VD, grad_low_NV.t() @ x_ND[part])
        ctx.save_for_backward(grad_x_ND, sum_VD)
        ctx.number = number
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + targets.z_loss * z, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        grad_x_ND, sum_VD = ctx.saved_tensors
        if grad_x_ND is not None:  # the factor in its own precision: bf16 would make it wrong by up to 0.4 %
            grad_x_ND = (grad_x_ND.to(gradient.dtype) * gradient).to(grad_x_ND.dtype)
        if sum_VD is None:
            return grad_x_ND, None, None, None, None
        VisitSum.of(ctx.number).add_scaled(sum_VD, gradient)
        return grad_x_ND, None, gradient.new_zeros(()), None, None
