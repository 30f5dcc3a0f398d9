"""A cache that grows and whose rows are exchanged, against full forward passes."""

from __future__ import annotations

import pytest
import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel, ModelConfigError
from deeploop_model.kv_cache import KVCache

CONFIG = DeepLoopConfig(num_blocks=2, num_rounds=3, d_model=16, num_heads=2, context_length=24, vocab_size=50)


@pytest.fixture
def model() -> DeepLoopModel:
    return DeepLoopModel(CONFIG).double().requires_grad_(False)


def test_growing_keeps_what_is_stored_and_padding_stays_unseen(model: DeepLoopModel) -> None:
    tokens_BT = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = KVCache(CONFIG, 2, capacity=6)
    cache.reserve(6)
    model(tokens_BT[:, :6], cache=cache, new_tokens=[6, 4])  # the second row's padding goes to the spare column
    with pytest.raises(ModelConfigError, match="more than its capacity of 6"):
        model(tokens_BT[:, 6:8], cache=cache)
    cache.reserve(9)
    second_BT = torch.stack((tokens_BT[0, 6:9], tokens_BT[1, 4:7]))
    logits_BTV = model(second_BT, cache=cache).logits
    full_BTV = model(tokens_BT).logits
    torch.testing.assert_close(logits_BTV[0], full_BTV[0, 6:9], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits_BTV[1], full_BTV[1, 4:7], rtol=0, atol=1e-12)
    with pytest.raises(ModelConfigError, match="context_length: 25 tokens are more than the 24 read"):
        cache.reserve(25)


def test_selected_rows_go_on_as_copies(model: DeepLoopModel) -> None:
    tokens_BT = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(2))
    cache = KVCache(CONFIG, 3, capacity=8)
    model(tokens_BT[:, :6], cache=cache, new_tokens=[6, 5, 3])
    cache.select(torch.tensor([1, 1, 0]))
    assert cache.lengths == [5, 5, 6]
    next_BT = torch.tensor([[7], [9], [11]])
    logits_BTV = model(next_BT, cache=cache).logits
    for row, (source, length) in enumerate([(1, 5), (1, 5), (0, 6)]):
        whole = torch.cat((tokens_BT[source, :length], next_BT[row]))
        torch.testing.assert_close(logits_BTV[row, 0], model(whole[None]).logits[0, -1], rtol=0, atol=1e-12)
