"""What all visits of one forward pass share: positions, the rotary table, and who may attend to whom.

Packed documents: with document ids [B, T], a token attends to earlier tokens of its own document only, and positions
restart at 0 with every document. Rotary positions are relative, so restarting changes nothing for them; learned
positions must restart for a packed document to equal the same document alone.

Shape suffixes: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError
from deeploop_model.rotary import RotaryTable, rotary_table
from deeploop_model.visit_gradients import VisitPass


@dataclass(frozen=True)
class SequenceContext:
    """Handed to every visit of one forward pass."""

    positions: Tensor
    """int64 [T], or [B, T] where sequences differ."""
    rotary: RotaryTable | None
    """None where positions are learned or absent."""
    mask_B1TT: Tensor | None = None
    """True where a query (row) may attend to a key (column); None for plain causal attention."""
    visits: VisitPass = field(default_factory=VisitPass)
    """Where the visits' gradients are gathered."""
    observe: Callable[[nn.Module, Tensor, Tensor], None] | None = None
    """Is told of each block visited, with the stream [B, T, D] before and after it."""


def sequence_context(
    config: DeepLoopConfig, tokens_BT: Tensor, dtype: torch.dtype, documents_BT: Tensor | None = None
) -> SequenceContext:
    """The context of a forward pass over whole sequences from position 0.

    Raises ModelConfigError for more tokens than the context length, or document ids of another shape.
    """
    length = tokens_BT.shape[1]
    if length > config.context_length:
        raise ModelConfigError(f"context_length: {length} tokens were given, the model reads {config.context_length}")
    positions, mask = torch.arange(length, device=tokens_BT.device), None
    if documents_BT is not None:
        if documents_BT.shape != tokens_BT.shape:
            raise ModelConfigError(
                f"documents: shape {list(documents_BT.shape)} must be that of the tokens, {list(tokens_BT.shape)}"
            )
        positions, mask = packed_documents(documents_BT)
    rotary = rotary_table(positions, config.head_dim, config.rope_base, dtype) if config.position == "rope" else None
    return SequenceContext(positions, rotary, mask)


def packed_documents(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, T] within each document and the mask [B, 1, T, T].

    A document is a run of equal ids: an id that comes back after another one starts a new document.
    """
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    first_BT = torch.where(starts_BT, index_T, 0).cummax(dim=1).values
    # Same document and not in the future: the key lies at or after the first token of the query's document.
    mask_BTT = (index_T >= first_BT.unsqueeze(-1)) & (index_T <= index_T.unsqueeze(-1))
    return index_T - first_BT, mask_BTT.unsqueeze(1)
