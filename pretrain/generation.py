"""A text sample from a model under training."""

from __future__ import annotations

import torch

from data_prep.tokenizer import Tokenizer
from pretrain.engine import Engine


@torch.no_grad()
def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, num_tokens: int, context: int, seed: int, device: torch.device
) -> str:
    """The prompt and `num_tokens` sampled tokens after it, at temperature 1. Stops at the end of a document.

    Every rank must call it with the same arguments: under ZeRO-3 a forward pass gathers weights from all.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]  # documents follow an end-of-document token
    start = len(ids)
    engine.eval()
    for _ in range(num_tokens):
        tokens_BT = torch.tensor([ids[-context:]], device=device)
        logits_V = engine(tokens_BT).logits[0, -1].float().cpu()
        ids.append(int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator)))
        if ids[-1] == tokenizer.eos_id:
            break
    engine.train()
    return prompt + tokenizer.decode([i for i in ids[start:] if i != tokenizer.eos_id])
