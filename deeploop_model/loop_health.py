"""What the loop does to its states and predictions, measured in one forward pass without gradients.

| quantity          | per            | definition, a mean over tokens where nothing else is said                      |
|-------------------|----------------|--------------------------------------------------------------------------------|
| state_norm        | round, block   | root mean square of the stream after the block                                 |
| state_change      | round, block   | |x_r - x_(r-1)| / |x_(r-1)|, x_r the stream after the block in round r         |
| state_cosine      | round, block   | cosine of x_r and x_(r-1)                                                      |
| attention_entropy | round, block   | entropy in nats, a mean over heads and the queries that see two keys or more   |
| attention_logit   | round, block   | largest q.k / sqrt(head_dim) of a visible pair, over all tokens and heads      |
| loss              | round          | cross-entropy in nats if the loop ended after the round                        |
| prediction_kl     | round          | KL(p_r || p_(r-1)) in nats of the predictions read out after rounds r and r-1  |

Those that compare rounds begin with round 2. Prelude and coda are not measured; read-outs pass through the coda.

Shape suffixes: B batch, T time, D d_model, R rounds, K blocks, V vocabulary, H query heads, G key-value heads, C
head_dim, N tokens of a chunk, Q quantities.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop_model.blocks import Block
from deeploop_model.norm import stream_dtype
from deeploop_model.sequence import SequenceContext

if TYPE_CHECKING:
    from deeploop_model.model import DeepLoopModel

PER_BLOCK = ("state_norm", "state_change", "state_cosine", "attention_entropy", "attention_logit")
PER_ROUND = ("loss", "prediction_kl")
CHUNK_ELEMENTS = 2**24
"""Logits or attention scores held at once: 64 MiB in float32."""


class LoopSums(NamedTuple):
    """Of one batch, float64. All add up over batches and ranks, except `largest_logit_RK`, whose maximum counts."""

    counts: Tensor
    """[3]: tokens, tokens with a target, and rows of attention (query x head) that see two keys or more."""
    states_QRK: Tensor
    """Squares (means over D), relative changes, cosines, entropies."""
    read_outs_QR: Tensor
    """Losses, divergences."""
    largest_logit_RK: Tensor


class LoopHealth(NamedTuple):
    """By the names of the table above; nan where there is no round before."""

    per_block: dict[str, list[list[float]]]
    """[round][block]."""
    per_round: dict[str, list[float]]


def health_of(sums: LoopSums) -> LoopHealth:
    """Means of the sums over all batches and ranks."""
    tokens, targets, rows = sums.counts.clamp(min=1).tolist()
    squares_RK, changes_RK, cosines_RK, entropies_RK = sums.states_QRK.cpu()
    changes_RK, cosines_RK = changes_RK / tokens, cosines_RK / tokens
    losses_R, divergences_R = sums.read_outs_QR.cpu()
    divergences_R = divergences_R / tokens
    for compared in (changes_RK, cosines_RK, divergences_R):
        compared[0] = torch.nan
    by_block = ((squares_RK / tokens).sqrt(), changes_RK, cosines_RK, entropies_RK / rows, sums.largest_logit_RK)
    return LoopHealth(
        {name: values.tolist() for name, values in zip(PER_BLOCK, by_block, strict=True)},
        {"loss": (losses_R / targets).tolist(), "prediction_kl": divergences_R.tolist()},
    )


@torch.no_grad()
def observed_pass(
    model: DeepLoopModel, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None, num_rounds: int
) -> LoopSums:
    """Runs the loop once and reads it out after every round. To be called by the model's own `forward`, outside of
    which ZeRO-3 has no whole weights."""
    sequence = model.sequence(tokens_BT, documents_BT)
    states = _States(num_rounds, len(model.blocks), sequence, tokens_BT.device)
    observed = dataclasses.replace(sequence, observe=states.observe)
    e_BTD = model.enter(tokens_BT, sequence)
    outputs = []
    for x_BTD in model.rounds(e_BTD, observed, num_rounds):
        # In the weights' precision, which the output matrix reads: rounds are kept until all are there.
        outputs.append(model.leave(x_BTD, sequence).to(model.embedding.weight.dtype))
    targets = (targets_BT >= 0).sum()
    counts = torch.stack((torch.tensor(tokens_BT.numel(), device=targets.device), targets, states.rows)).double()
    return LoopSums(counts, states.sums_QRK, _read_outs(model, outputs, targets_BT, sequence), states.largest_logit_RK)


class _States:
    """Takes in the visits of the looped blocks in their order."""

    def __init__(self, num_rounds: int, num_blocks: int, sequence: SequenceContext, device: torch.device) -> None:
        self.sums_QRK = torch.zeros(4, num_rounds, num_blocks, dtype=torch.float64, device=device)
        self.largest_logit_RK = torch.full_like(self.sums_QRK[0], -torch.inf)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)
        self._sequence = sequence
        self._num_blocks = num_blocks
        self._visits = 0
        self._round_before: list[Tensor] = []

    def observe(self, block: nn.Module, before_BTD: Tensor, after_BTD: Tensor) -> None:
        assert isinstance(block, Block)
        r, k = divmod(self._visits, self._num_blocks)
        self._visits += 1
        sums_Q = self.sums_QRK[:, r, k]
        sums_Q[0] = after_BTD.square().mean(-1).double().sum()
        if r > 0:
            earlier_BTD = self._round_before[k]
            change_BT = torch.linalg.vector_norm(after_BTD - earlier_BTD, dim=-1)
            sums_Q[1] = (change_BT / torch.linalg.vector_norm(earlier_BTD, dim=-1)).double().sum()
            sums_Q[2] = F.cosine_similarity(after_BTD, earlier_BTD, dim=-1).double().sum()
            self._round_before[k] = after_BTD
        else:
            self._round_before.append(after_BTD)
        q_BHTC, k_BGTC, _ = block.attention.heads(block.attention_input(before_BTD), self._sequence)
        sums_Q[3], rows, self.largest_logit_RK[r, k] = _attention(q_BHTC, k_BGTC, self._sequence.mask_B1TT)
        if r == k == 0:
            self.rows = rows


def _attention(q_BHTC: Tensor, k_BGTC: Tensor, mask_B1TT: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of entropies over rows that see two keys or more, their number, and the largest visible logit."""
    batch, heads, length, width = q_BHTC.shape
    dtype = stream_dtype(q_BHTC)
    k_BHTC = k_BGTC.repeat_interleave(heads // k_BGTC.shape[1], dim=1).to(dtype)
    index_T = torch.arange(length, device=q_BHTC.device)
    entropy = torch.zeros((), dtype=torch.float64, device=q_BHTC.device)
    rows = torch.zeros((), dtype=torch.int64, device=q_BHTC.device)
    largest = torch.full_like(entropy, -torch.inf)
    step = max(1, CHUNK_ELEMENTS // (batch * heads * length))
    for start in range(0, length, step):
        part = slice(start, start + step)
        visible = (index_T <= index_T[part, None])[None, None] if mask_B1TT is None else mask_B1TT[:, :, part]
        scores_BHNT = q_BHTC[:, :, part].to(dtype) @ k_BHTC.transpose(-1, -2) / math.sqrt(width)
        scores_BHNT = scores_BHNT.masked_fill(~visible, -torch.inf)
        several = (visible.sum(-1) > 1).expand(batch, heads, -1)
        of_rows = torch.special.entr(scores_BHNT.softmax(-1)).sum(-1)
        entropy += torch.where(several, of_rows, 0.0).double().sum()
        rows += several.sum()
        largest = torch.maximum(largest, scores_BHNT.max().double())
    return entropy, rows, largest


def _read_outs(model: DeepLoopModel, outputs: list[Tensor], targets_BT: Tensor, sequence: SequenceContext) -> Tensor:
    """Sums over tokens of each round's loss and of its divergence from the round before, [2, R]."""
    sums_QR = torch.zeros(2, len(outputs), dtype=torch.float64, device=targets_BT.device)
    dtype = stream_dtype(model.embedding.weight)
    targets_T = targets_BT.flatten()
    step = max(1, CHUNK_ELEMENTS // model.config.padded_vocab_size)
    for start in range(0, len(targets_T), step):
        part, before_NV = slice(start, start + step), None
        for r, x_BTD in enumerate(outputs):
            logits_NV = model.project(x_BTD.flatten(0, 1)[None, part], sequence)[0]
            log_p_NV = logits_NV.to(dtype).log_softmax(-1)
            sums_QR[0, r] += F.nll_loss(log_p_NV, targets_T[part], reduction="sum")
            if before_NV is not None:
                sums_QR[1, r] += F.kl_div(before_NV, log_p_NV, log_target=True, reduction="sum")
            before_NV = log_p_NV
    return sums_QR
