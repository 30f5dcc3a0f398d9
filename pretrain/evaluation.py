"""Loss of a model by number of rounds and by position, over windows of a split, on any number of ranks.

Shape suffixes: B batch, T time, D d_model, R chosen numbers of rounds, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from data_prep.order import num_samples
from data_prep.reader import TokenSplit
from deeploop_model import DeepLoopModel
from pretrain.data_feed import Batch, bytes_per_token, windows_on_device
from pretrain.monitor.loss_units import bits_per_byte, perplexity
from pretrain.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over the same tokens for every number of rounds."""

    rounds: tuple[int, ...]
    context: int
    windows: int
    """Windows of `context` tokens, spread evenly over the split."""
    nats_RT: Tensor
    """float64 [R, T]: mean loss at each position of a window."""
    bytes_per_token: float | None
    """UTF-8 bytes of text per token of the split; None where the manifest does not know."""

    def loss(self, row: int) -> float:
        """Nats per token at `rounds[row]`."""
        return float(self.nats_RT[row].mean())

    def perplexity(self, row: int) -> float:
        """e to the loss."""
        return perplexity(self.loss(row))

    def bits_per_byte(self, row: int) -> float | None:
        """None where the dataset does not know its bytes."""
        return None if self.bytes_per_token is None else bits_per_byte(self.loss(row), self.bytes_per_token)

    def by_position(self, row: int) -> dict[str, float]:
        """Nats per token at positions 0, 1, 2-3, 4-7 and so on."""
        edges = [0, *(2**n for n in range(self.context.bit_length()) if 2**n < self.context), self.context]
        return {
            f"{low}-{high - 1}" if high - low > 1 else f"{low}": float(self.nats_RT[row, low:high].mean())
            for low, high in itertools.pairwise(edges)
        }


@torch.no_grad()
def evaluate(
    model: DeepLoopModel,
    split: TokenSplit,
    rounds: Sequence[int],
    *,
    context: int,
    max_windows: int | None,
    batch_size: int,
    separate_documents: bool,
    ranks: Ranks,
) -> Evaluation:
    """Runs each window once, to the largest of `rounds`, and reads the loss out after each of them.

    Ranks take windows in turn and add up float64 sums, so that neither their number nor the batch size matters beyond
    rounding. Every rank must call it.
    """
    available = num_samples(split.num_tokens, context)
    windows = available if max_windows is None else min(available, max_windows)
    ids = np.linspace(0, available, windows, endpoint=False).astype(np.int64)[ranks.rank :: ranks.world_size]
    total_RT = torch.zeros(len(rounds), context, dtype=torch.float64, device=ranks.device)
    for first in tqdm(range(0, len(ids), batch_size), unit="batch", disable=not ranks.is_main):
        batch = windows_on_device(
            split, ids[first : first + batch_size], context, ranks.device, separate_documents=separate_documents
        )
        total_RT += torch.stack([nats_BT.sum(dim=0) for nats_BT in losses_after(model, batch, rounds)])
    dist.all_reduce(total_RT)
    return Evaluation(tuple(rounds), context, windows, (total_RT / windows).cpu(), bytes_per_token(split))


def losses_after(model: DeepLoopModel, batch: Batch, rounds: Sequence[int]) -> Iterator[Tensor]:
    """Loss in nats of every token, float64 [B, T], after each of the ascending numbers of rounds."""
    sequence = model.sequence(batch.tokens_BT, batch.documents_BT)
    e_BTD = model.enter(batch.tokens_BT, sequence)
    wanted = set(rounds)
    for done, x_BTD in enumerate(model.rounds(e_BTD, sequence, max(rounds)), start=1):
        if done in wanted:
            logits_BTV = model.project(model.leave(x_BTD, sequence), sequence).to(x_BTD.dtype)
            nats = F.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="none")
            yield nats.view(batch.targets_BT.shape).double()
