"""The looped GPT: K stored blocks, applied R rounds.

    x = RMSNorm(E[tokens])                 (norm after; plain E[tokens] where the norm sits before)
    for round r in 1..R:
        for block k in 1..K:
            x <- RMSNorm(alpha*x + Attention_k(x))
            x <- RMSNorm(alpha*x + FeedForward_k(x))
    logits = x E^T

alpha and beta belong to the N = K*R of the config, that of training. A forward pass with another number of rounds
uses the same alpha.

Shape suffixes: B batch, T time, D d_model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop_model.blocks import Block, RMSNorm, stream_dtype
from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError
from deeploop_model.init import initialise
from deeploop_model.recompute import RecomputePolicy, check_policy, recomputed
from deeploop_model.rotary import RotaryTable, rotary_table

IGNORED_TARGET = -100


@dataclass(frozen=True)
class ModelOutput:
    """`logits` [B, T, vocab_size] in the weights' precision; `loss` the mean cross-entropy in nats, or None."""

    logits: Tensor
    loss: Tensor | None


class DeepLoopModel(nn.Module):
    """A causal looped language model.

    Args:
        config: the model; its `num_rounds` is the R of training.
        seed: of the initial weights.
        recompute: what the backward pass computes again, see `deeploop_model.recompute`.
    """

    def __init__(self, config: DeepLoopConfig, *, seed: int = 0, recompute: RecomputePolicy = "none") -> None:
        super().__init__()
        self.config = config
        self.recompute = check_policy(recompute)
        norm_first = config.rule.norm == "before"
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model)
        # Post-LN visits expect a stream of unit RMS, the first one too (as in BERT); Pre-LN normalises at the end.
        self.embedding_norm = None if norm_first else RMSNorm(config.d_model, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps) if norm_first else None
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.padded_vocab_size, bias=False)
        initialise(self, seed)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, num_rounds: int | None = None
    ) -> ModelOutput:
        """Logits for every position, and the mean loss where targets are given.

        Args:
            tokens_BT: int64 token ids, T <= context_length.
            targets_BT: int64 ids of the next tokens; -100 is left out of the mean.
            num_rounds: rounds to run; the config's by default. Alpha stays that of training.
        """
        x_BTD = self.loop(self.embed(tokens_BT), self.config.num_rounds if num_rounds is None else num_rounds)
        logits_BTV = self.project(x_BTD)
        if targets_BT is None:
            return ModelOutput(logits_BTV, None)
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1).to(x_BTD.dtype), targets_BT.flatten(), ignore_index=IGNORED_TARGET
        )
        return ModelOutput(logits_BTV, loss)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The stream before the first round, [B, T, D]."""
        if tokens_BT.shape[1] > self.config.context_length:
            raise ModelConfigError(
                f"context_length: {tokens_BT.shape[1]} tokens were given, the model reads {self.config.context_length}"
            )
        x_BTD: Tensor = self.embedding(tokens_BT).to(stream_dtype(self.embedding.weight))
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def loop(self, x_BTD: Tensor, num_rounds: int) -> Tensor:
        """Applies the stack of K blocks `num_rounds` times."""
        if num_rounds < 1:
            raise ModelConfigError(f"num_rounds: {num_rounds} must be 1 or more")
        config = self.config
        rotary = rotary_table(x_BTD.shape[1], config.head_dim, config.rope_base, x_BTD.device, x_BTD.dtype)

        def one_round(x_BTD: Tensor) -> Tensor:
            return self.one_round(x_BTD, rotary)

        step = recomputed(one_round) if self.recompute == "round" and torch.is_grad_enabled() else one_round
        for _ in range(num_rounds):
            x_BTD = step(x_BTD)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def one_round(self, x_BTD: Tensor, rotary: RotaryTable) -> Tensor:
        """Applies blocks 1..K once."""
        for block in self.blocks:

            def one_block(x_BTD: Tensor, block: nn.Module = block) -> Tensor:
                return block(x_BTD, rotary)  # type: ignore[no-any-return]

            step = recomputed(one_block) if self.recompute == "block" and torch.is_grad_enabled() else one_block
            x_BTD = step(x_BTD)
        return x_BTD

    def project(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, vocab_size]: the padding of the vocabulary is cut off, so it is never predicted."""
        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(x_BTD.to(weight_VD.dtype), weight_VD)[..., : self.config.vocab_size]
