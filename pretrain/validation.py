"""The validation loss: the mean cross-entropy over the same windows of the validation split every time."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from data_prep.order import num_samples
from data_prep.reader import TokenSplit
from deeploop_model.loss_head import IGNORED_TARGET
from pretrain.config import RunConfig
from pretrain.data_feed import windows_on_device
from pretrain.engine import Engine
from pretrain.ranks import Ranks


@torch.no_grad()
def validation_loss(engine: Engine, split: TokenSplit, config: RunConfig, ranks: Ranks) -> float:
    """Mean loss in nats per token over up to `train.validation_samples` windows spread evenly over the split.

    Every rank runs the same number of forward passes (ZeRO-3 gathers weights in each), the last ones on windows that
    count for nothing where the samples do not divide evenly.
    """
    context, micro_batch = config.model.context_length, config.train.micro_batch_size
    available = num_samples(split.num_tokens, context)
    wanted = min(available, config.train.validation_samples)
    ids = np.linspace(0, available, wanted, endpoint=False).astype(np.int64)
    per_pass = micro_batch * ranks.world_size
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    engine.eval()
    for first in range(0, wanted, per_pass):
        places = first + ranks.rank * micro_batch + np.arange(micro_batch)
        batch = windows_on_device(
            split,
            ids[np.minimum(places, wanted - 1)],
            context,
            ranks.device,
            separate_documents=config.data.separate_documents,
        )
        counted = torch.from_numpy(places < wanted).to(ranks.device)
        targets_BT = batch.targets_BT.masked_fill(~counted[:, None], IGNORED_TARGET)
        loss = engine(batch.tokens_BT, targets_BT, documents_BT=batch.documents_BT).loss
        weight = counted.sum().double()
        total += torch.stack((torch.where(weight > 0, loss.double() * weight, 0.0), weight))
    engine.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
