"""The looped GPT: an optional prelude, K stored blocks applied R rounds, an optional coda. One forward pass for all.

    x = RMSNorm(E[tokens] (+ P[positions]))       (norm after; no RMSNorm here where the norm sits before)
    e = x = prelude(x)
    for round r in 1..R:
        x <- inject(x, e)                         (with injection)
        x <- x + U[r]                             (with a round embedding)
        for block k in 1..K:
            x <- RMSNorm(alpha*x + Attention_k(x))
            x <- RMSNorm(alpha*x + FeedForward_k(x))
    x = coda(x)
    logits = x E^T

Blocks of prelude and coda are blocks like the others, with weights of their own and visited once. alpha and beta
belong to the N = P + K*R + C of the config, that of training. A forward pass with another number of rounds uses the
same alpha.

U has one row per round of training and starts at zero; rounds past the last row take the last row.

Shape suffixes: B batch, T time, D d_model, R rounds, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop_model.blocks import Block
from deeploop_model.compilation import BlockStep
from deeploop_model.config import DeepLoopConfig
from deeploop_model.decoding import cached_pass
from deeploop_model.early_exit import EarlyExit
from deeploop_model.embedding import TokenEmbedding
from deeploop_model.errors import ModelConfigError
from deeploop_model.init import initialise
from deeploop_model.injection import Injection
from deeploop_model.kv_cache import CacheSlot, KVCache
from deeploop_model.loop_health import LoopSums, observed_pass
from deeploop_model.loss_head import Losses, OutputHead, Targets
from deeploop_model.norm import RMSNorm, stream_dtype
from deeploop_model.recompute import Recompute, recomputed
from deeploop_model.round_loss import RoundLoss, round_weights
from deeploop_model.round_states import RoundStates, recomputed_rounds
from deeploop_model.sequence import SequenceContext, sequence_context

Slots = Sequence[CacheSlot] | None  # of a key-value cache, one per block


class ModelOutput(NamedTuple):
    """What a forward pass gives.

    A tuple, because DeepSpeed looks into tuples for the tensors whose backward pass it prepares, and into no other
    class: without that ZeRO-1 in bf16 would count earlier micro-batches twice.
    """

    logits: Tensor | None
    """[B, T, vocab_size] in the weights' precision; with targets they never exist as a whole."""
    loss: Tensor | None
    """What training minimises: the mean cross-entropy in nats, over rounds as `round_loss` says, and the z term."""
    last_loss: Tensor | None = None
    """The mean cross-entropy of the last round, without a graph."""
    rounds: Tensor | None = None
    """With a cache, the rounds [B, T] that each token ran."""
    loop: LoopSums | None = None
    """Of an observed pass, which has no logits."""


class DeepLoopModel(nn.Module):
    """A causal looped language model.

    Args:
        config: the model; its `num_rounds` is the R of training.
        seed: of the initial weights.
        recompute: what the backward pass computes again, as text, see `deeploop_model.recompute`.
    """

    def __init__(self, config: DeepLoopConfig, *, seed: int = 0, recompute: str = "none") -> None:
        super().__init__()
        self.config = config
        self.recompute = Recompute.parse(recompute)
        d_model, norm_first = config.d_model, config.rule.norm == "before"
        self.embedding = TokenEmbedding(config.padded_vocab_size, d_model)
        self.position_embedding = nn.Embedding(config.context_length, d_model) if config.position == "learned" else None
        # Post-LN visits expect a stream of unit RMS, the first one too (as in BERT); Pre-LN normalises at the end.
        self.embedding_norm = None if norm_first else RMSNorm(d_model, config.norm_eps)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.num_prelude_blocks))
        self.injection = None if config.injection == "none" else Injection(config)
        self.round_embedding = nn.Embedding(config.num_rounds, d_model) if config.round_embedding else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.coda = nn.ModuleList(Block(config) for _ in range(config.num_coda_blocks))
        self.final_norm = RMSNorm(d_model, config.norm_eps) if norm_first else None
        self.head = None if config.tie_embeddings else OutputHead(d_model, config.padded_vocab_size)
        self.block_step: BlockStep | None = None
        """Runs a block in its place, see `deeploop_model.compilation`."""
        initialise(self, seed)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        num_rounds: int | None = None,
        documents_BT: Tensor | None = None,
        *,
        backprop_rounds: int | None = None,
        round_loss: RoundLoss = "last",
        z_loss: float = 0.0,
        cache: KVCache | None = None,
        new_tokens: Sequence[int] | None = None,
        early_exit: EarlyExit | None = None,
        observed: bool = False,
    ) -> ModelOutput:
        """Logits for every position, or the mean loss where targets are given.

        Args:
            tokens_BT: int64 token ids, T <= context_length.
            targets_BT: int64 ids of the next tokens; -100 is left out of the mean.
            num_rounds: rounds to run; the config's by default. Alpha stays that of training.
            documents_BT: a document id per token; attention and positions stay within runs of one id.
            backprop_rounds: b, the last rounds that back-propagation passes through; all by default. The stream that
                enters them is a constant: the gradient reaches what lies before only through injection.
            round_loss: which rounds are read out for the loss, see `deeploop_model.round_loss`.
            z_loss: factor of the mean squared log-partition in every loss, see `deeploop_model.loss_head`.
            cache: keys and values of earlier tokens, which these follow; it fixes the number of rounds.
            new_tokens: with a cache, the number of real tokens at the start of each row; all T by default.
            early_exit: with a cache, when tokens stop looping.
            observed: measure the loop instead, see `deeploop_model.loop_health`; needs targets, gives `loop` only.

        Raises ModelConfigError for arguments that do not go together.
        """
        for_training = (
            targets_BT, num_rounds, documents_BT, backprop_rounds, None if round_loss == "last" else 1, z_loss or None
        )  # fmt: skip
        if cache is not None and any(argument is not None for argument in for_training):
            raise ModelConfigError(
                "cache: has its own num_rounds, and goes with tokens, new_tokens and early_exit only"
            )
        if cache is None and (new_tokens is not None or early_exit is not None):
            raise ModelConfigError("new_tokens and early_exit: need a cache")
        if cache is not None:
            logits_BTV, rounds_BT = cached_pass(self, tokens_BT, cache, new_tokens, early_exit)
            return ModelOutput(logits_BTV, None, rounds=rounds_BT)
        num_rounds = self.config.num_rounds if num_rounds is None else num_rounds
        if observed:
            if targets_BT is None:
                raise ModelConfigError("observed: needs targets")
            return ModelOutput(None, None, loop=observed_pass(self, tokens_BT, targets_BT, documents_BT, num_rounds))
        weights = round_weights(round_loss, num_rounds, backprop_rounds)
        sequence = self.sequence(tokens_BT, documents_BT)
        targets = (
            None
            if targets_BT is None
            else Targets(targets_BT, self.config.vocab_size, stream_dtype(self.embedding.weight), z_loss)
        )
        losses = []
        with self.recompute.moving():
            x_BTD = e_BTD = self.enter(tokens_BT, sequence)
            for r, x_BTD in enumerate(self.rounds(e_BTD, sequence, num_rounds, backprop_rounds)):
                if targets is not None and weights[r] > 0 and r < num_rounds - 1:
                    losses.append(weights[r] * self.round_loss(x_BTD, targets, sequence))
            x_BTD = self.leave(x_BTD, sequence)
        if targets is None:
            return ModelOutput(self.project(x_BTD, sequence), None)
        last = self.losses(x_BTD, targets, sequence)
        return ModelOutput(None, sum(losses, weights[-1] * last.total), last_loss=last.cross_entropy)

    def sequence(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> SequenceContext:
        """What all visits of a forward pass over these tokens share."""
        return sequence_context(self.config, tokens_BT, stream_dtype(self.embedding.weight), documents_BT)

    def enter(self, tokens_BT: Tensor, sequence: SequenceContext, slots: Slots = None) -> Tensor:
        """The stream before the first round, [B, T, D]: embedded tokens after the prelude."""
        x_BTD: Tensor = self.embedding(tokens_BT).to(stream_dtype(self.embedding.weight))
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(sequence.positions)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        return self.stack_once(self.prelude, x_BTD, sequence, slots)

    def loop(self, e_BTD: Tensor, sequence: SequenceContext, num_rounds: int) -> Tensor:
        """Applies the stack of K blocks `num_rounds` times to the loop's input e."""
        x_BTD = e_BTD
        for x_BTD in self.rounds(e_BTD, sequence, num_rounds):  # noqa: B007
            pass
        return x_BTD

    def rounds(
        self, e_BTD: Tensor, sequence: SequenceContext, num_rounds: int, backprop_rounds: int | None = None
    ) -> Iterator[Tensor]:
        """The stream after each round, with a graph for the last `backprop_rounds` only."""
        if num_rounds < 1:
            raise ModelConfigError(f"num_rounds: {num_rounds} must be 1 or more")
        cut = 0 if backprop_rounds is None else max(0, num_rounds - backprop_rounds)
        u_RD = self.round_vectors(num_rounds, e_BTD)
        rounded = self.embedding.weight.itemsize == 2 and num_rounds > 1
        states = RoundStates(e_BTD, rounded=rounded, offload=self.recompute.offload)
        x_BTD = states.start(e_BTD)
        injected_BTD = None if self.injection is None else e_BTD  # recomputed rounds keep what they refer to

        def step(r: int, x_BTD: Tensor) -> Tensor:
            return self.one_round(x_BTD, injected_BTD, None if u_RD is None else u_RD[r], sequence)

        for r in range(cut):
            with torch.no_grad():
                x_BTD = states.advance(step(r, x_BTD), keep=False)
            yield x_BTD
        by_rounds = self.recompute.by_rounds and torch.is_grad_enabled()
        for first in range(cut, num_rounds, self.recompute.segment if by_rounds else 1):
            if by_rounds:
                group = range(first, min(first + self.recompute.segment, num_rounds))
                streams = recomputed_rounds(states, step, group, x_BTD)
            else:
                streams = [states.advance(step(first, x_BTD), keep=False)]
            x_BTD = streams[-1]
            if first + len(streams) == num_rounds:
                states.end()
            yield from streams

    def round_loss(self, x_BTD: Tensor, targets: Targets, sequence: SequenceContext) -> Tensor:
        """Loss as if the loop ended with this stream.

        Computed again under every policy: each would keep a gradient of the whole output matrix otherwise.
        """

        def read_out(x_BTD: Tensor) -> Tensor:
            return self.losses(self.leave(x_BTD, sequence), targets, sequence).total

        keeps_all = self.recompute.kind == "none" or not torch.is_grad_enabled()
        return read_out(x_BTD) if keeps_all else recomputed(read_out)(x_BTD)

    def round_vectors(self, num_rounds: int, like: Tensor) -> Tensor | None:
        """Round embeddings of rounds 1..num_rounds, [R, D] in the precision of the stream, or None."""
        if self.round_embedding is None:
            return None
        rows_R = torch.arange(num_rounds, device=like.device).clamp(max=self.config.num_rounds - 1)
        return self.round_embedding(rows_R).to(like.dtype)  # type: ignore[no-any-return]

    def one_round(
        self, x_BTD: Tensor, e_BTD: Tensor | None, u_D: Tensor | None, sequence: SequenceContext, slots: Slots = None
    ) -> Tensor:
        """Injection, round embedding, blocks 1..K."""
        if self.injection is not None:
            assert e_BTD is not None
            sequence.visits.begin(self.injection)
            x_BTD = self.injection(x_BTD, e_BTD)
        if u_D is not None:
            x_BTD = x_BTD + u_D
        return self.stack(self.blocks, x_BTD, sequence, slots)

    def stack_once(self, blocks: nn.ModuleList, x_BTD: Tensor, sequence: SequenceContext, slots: Slots) -> Tensor:
        """Prelude or coda, which is recomputed as one round is."""
        if len(blocks) == 0:
            return x_BTD
        return self.recompute.group(lambda x_BTD: self.stack(blocks, x_BTD, sequence, slots))(x_BTD)  # type: ignore[no-any-return]

    def stack(self, blocks: nn.ModuleList, x_BTD: Tensor, sequence: SequenceContext, slots: Slots) -> Tensor:
        """Applies each block once; `slots` holds a cache slot per block."""
        for block, slot in zip(blocks, [None] * len(blocks) if slots is None else slots, strict=True):

            def one_block(x_BTD: Tensor, block: nn.Module = block, slot: CacheSlot | None = slot) -> Tensor:
                sequence.visits.begin(block, compiled=self.block_step is not None)
                if self.block_step is not None and slot is None:
                    return self.block_step(block, x_BTD, sequence)
                return block(x_BTD, sequence, slot)  # type: ignore[no-any-return]

            before_BTD, x_BTD = x_BTD, self.recompute.block(one_block)(x_BTD)
            if sequence.observe is not None:
                sequence.observe(block, before_BTD, x_BTD)
        return x_BTD

    def leave(self, x_BTD: Tensor, sequence: SequenceContext, slots: Slots = None) -> Tensor:
        """From the stream after the last round to what the output matrix reads, [B, T, D]."""
        x_BTD = self.stack_once(self.coda, x_BTD, sequence, slots)
        if self.final_norm is None:
            return x_BTD
        sequence.visits.begin(self.final_norm)
        return self.final_norm(x_BTD)  # type: ignore[no-any-return]

    def project(self, x_BTD: Tensor, sequence: SequenceContext) -> Tensor:
        """Logits [B, T, vocab_size]: the padding of the vocabulary is cut off, so it is never predicted."""
        x_BTD = self.to_output(x_BTD, sequence)
        logits_BTV: Tensor = self.embedding(x_BTD, as_logits=True) if self.head is None else self.head(x_BTD)
        return logits_BTV[..., : self.config.vocab_size]

    def losses(self, x_BTD: Tensor, targets: Targets, sequence: SequenceContext) -> Losses:
        """Mean losses of what `project` would give."""
        output = self.embedding if self.head is None else self.head
        return output(self.to_output(x_BTD, sequence), targets=targets)  # type: ignore[no-any-return]

    def to_output(self, x_BTD: Tensor, sequence: SequenceContext) -> Tensor:
        """The stream in the precision of the output matrix, which is visited next."""
        output = self.embedding if self.head is None else self.head
        sequence.visits.begin(output)
        return x_BTD.to(output.weight.dtype)
