"""Gradient checkpointing across rounds: what the backward pass keeps and what it computes again.

| policy    | kept between forward and backward                      | computed again                                |
|-----------|--------------------------------------------------------|-----------------------------------------------|
| none      | every activation of every visit                        | nothing                                       |
| selective | outputs of matrix products and of attention            | norms, activations, rotations, casts          |
| block     | the stream before each block of each round             | one block at a time                           |
| round     | each round's change of the stream, in 16 bits (*)      | one round at a time                           |
| segment:n | state and rest before each group of n rounds, float32  | n rounds at a time                            |
| nested    | as round                                               | one round, then each of its blocks once more  |

(*) Whole states with float32 weights, or for a single round.

Prelude and coda count as a round each, whose input is kept whole. `+offload` after a policy, but selective, moves what
it keeps to the host's memory until it is needed. How a round's state is kept: `deeploop_model.round_states`.

Only the non-reentrant form exists here: the reentrant one reduces a shared weight's gradient once per visit, which
ZeRO-2 refuses ("Gradient computed twice for this partition").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deeploop_model.errors import ModelConfigError

Kind = Literal["none", "selective", "block", "round", "segment", "nested"]
POLICIES = ("none", "selective", "block", "round", "segment:2", "nested")
"""One of each kind."""
OFFLOAD = "+offload"

Step = Callable[..., Any]


@dataclass(frozen=True)
class Recompute:
    """A policy, as text: a kind, `segment:` with the number of rounds, and `+offload` behind it."""

    kind: Kind
    segment: int = 1
    """Rounds of one group; 1 for all other kinds."""
    offload: bool = False

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Raises ModelConfigError for a policy that does not exist."""
        name, colon, number = text.removesuffix(OFFLOAD).partition(":")
        segment = int(number) if number.isdecimal() else 0
        if name not in get_args(Kind) or (name == "segment") != bool(colon) or (colon and segment < 1):
            kinds = ", ".join(kind if kind != "segment" else "segment:N" for kind in get_args(Kind))
            raise ModelConfigError(f"recompute: {text!r} is unknown; use one of {kinds}, {OFFLOAD} behind it or not")
        if name == "selective" and text.endswith(OFFLOAD):
            raise ModelConfigError(
                f"recompute: {text!r}: PyTorch keeps selected products itself, on the device; use block"
            )
        return cls(name, segment or 1, text.endswith(OFFLOAD))  # type: ignore[arg-type]

    @property
    def by_rounds(self) -> bool:
        """Whether rounds are computed again as a whole."""
        return self.kind in ("round", "segment", "nested")

    def block(self, step: Step) -> Step:
        """The step of one block under this policy."""
        if not torch.is_grad_enabled() or self.kind not in ("selective", "block", "nested"):
            return step
        return recomputed(step, keep_products=self.kind == "selective")

    def group(self, step: Step) -> Step:
        """The step of one group of rounds, the prelude or the coda under this policy."""
        return recomputed(step) if self.by_rounds and torch.is_grad_enabled() else step

    def moving(self) -> AbstractContextManager[None]:
        """While it lasts, what autograd keeps goes to the host where the policy says so."""
        return _offloaded() if self.offload and torch.is_grad_enabled() else nullcontext()


def recomputed(step: Step, *, keep_products: bool = False) -> Step:
    """The same function, keeping only its input for the backward pass, or its matrix products as well."""
    # No step draws random numbers, so there is no generator state to save and restore.
    run = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False)
    if keep_products:
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, _keep_products))
    return run


_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
)  # fmt: skip


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Expensive for their size: everything else of a block is one pass over memory."""
    keep = op.name().partition(".")[0] in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, page-locked where there is a GPU that fetches it."""
    tensor = tensor.contiguous()  # a copy between other layouts would wait for the device
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _offloaded() -> saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        # Weights stay where they are, and small tensors cost more to move than to keep.
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage().nbytes() < SMALLEST_MOVED:
            return tensor
        return tensor.device, to_host(tensor)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


SMALLEST_MOVED = 1024
"""Bytes."""
