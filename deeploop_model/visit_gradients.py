"""Gradients of weights that one forward pass visits many times, summed in float32.

Autograd sums the R gradients of a shared bf16 weight in bf16, and the error grows with R. Here each visit's gradient
goes to a float32 sum of its weight instead, and autograd sees one gradient, when all visits have given theirs:

    forward    entry = Entry(weight)                      a scalar that stands for the weight, once per pass
               y_r = visit(x_r, weight, entry)            every visit, R times
    backward   each visit: sum += its gradient;           then, all visits done: Entry hands `sum` to the weight

The scalar makes autograd count the visits: it runs Entry's backward after the last of them, whatever their order, with
recomputation, truncated back-propagation or several losses. So the weight's gradient hook, in which ZeRO reduces, runs
once per backward pass. One float32 buffer per weight is alive, from the first visit's backward to the handing over.

The sum belongs to a forward pass: passes that overlap cannot mix, nor can a backward pass that fails with a later
pass; its own graph is of no use after that. Back-propagation
must reach the weights themselves: `torch.autograd.grad` for inputs only would leave gradients in the sum.

float32 and float64 weights take the same way and are summed in their own precision.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PART_ELEMENTS = 2**17
"""512 KiB in float32, which a core's cache holds: as fast as adding in bf16, twice as fast as one whole copy."""


class VisitNorms:
    """Squared gradient norms of one weight over all passes since it was made: what kappa_R is computed from.

    Both are scalars on the weight's device.
    """

    def __init__(self) -> None:
        self.of_visits: Tensor | None = None
        """sum over passes and visits of |g_r|^2."""
        self.of_sums: Tensor | None = None
        """sum over passes of |sum over visits g_r|^2."""

    def add_visit(self, gradient: Tensor) -> None:
        self.of_visits = _added(self.of_visits, gradient)

    def add_sum(self, gradient: Tensor) -> None:
        self.of_sums = _added(self.of_sums, gradient)


class VisitSum:
    """The sum of one weight's visit gradients in one backward pass, and its number, by which visits find it."""

    _numbers = itertools.count()
    _alive: ClassVar[weakref.WeakValueDictionary[int, VisitSum]] = weakref.WeakValueDictionary()

    def __init__(self, norms: VisitNorms | None, *, compiled: bool = False) -> None:
        self._buffer: Tensor | None = None
        """The only gradient until now, as it came, or a float32 sum: a weight that is visited once costs nothing."""
        self._own = False
        self._norms = norms
        self._copies = compiled  # compiled graphs use their buffers again
        # A tensor: a compiled graph takes it as an input, whereas a number would be part of the graph.
        number = next(self._numbers)
        self.number = torch.tensor(number)
        self._alive[number] = self

    @classmethod
    def of(cls, number: Tensor) -> VisitSum:
        return cls._alive[int(number)]

    def add(self, gradient: Tensor) -> None:
        if self._norms is not None:
            self._norms.add_visit(gradient)
        if self._buffer is None:
            self._buffer = gradient.clone() if self._copies else gradient
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if self._buffer.dtype == dtype and not self._own:
            self._buffer = self._buffer + gradient  # autograd may use the first one elsewhere
        else:
            self._buffer = self._buffer.to(dtype)
            add_to(self._buffer, gradient)
        self._own = True

    def add_scaled(self, gradient: Tensor, factor: Tensor) -> None:
        """Adds a gradient in the sum's precision times a scalar."""
        if self._buffer is None:
            self._buffer = gradient * factor
        elif self._own:
            self._buffer.addcmul_(gradient, factor)
        else:
            self._buffer = torch.addcmul(self._buffer.to(gradient.dtype), gradient, factor)
        self._own = True

    def take(self) -> Tensor | None:
        """The sum, which starts anew."""
        total, self._buffer, self._own = self._buffer, None, False
        if self._norms is not None and total is not None:
            self._norms.add_sum(total)
        return total


@torch.library.custom_op("deeploop::add_visit_gradient", mutates_args=())
def add_visit_gradient(gradient: Tensor, number: Tensor) -> Tensor:
    """Adds to the sum with this number. Returns the gradient of the weight's entry, a scalar without a meaning.

    An operator, so that compiled backward passes can call it. It is none without effect, as it tells the compiler, but
    its result is used and its order doesn't matter, which is all that the compiler draws from that.
    """
    VisitSum.of(number).add(gradient)
    return gradient.new_zeros(())


@add_visit_gradient.register_fake
def _(gradient: Tensor, number: Tensor) -> Tensor:
    return gradient.new_zeros(())


class _Entry(torch.autograd.Function):
    """A scalar that all visits of a weight hang on."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, visit_sum: VisitSum) -> Tensor:
        ctx.visit_sum, ctx.dtype = visit_sum, weight.dtype
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        total = ctx.visit_sum.take()
        return (None if total is None else total.to(ctx.dtype)), None


class _LinearVisit(torch.autograd.Function):
    """x W^T, with the gradient of W going to its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, entry: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, Tensor, None]:
        x, weight, number = ctx.saved_tensors
        grad_x = grad_y @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad_y.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, None, add_visit_gradient(grad_weight, number), None


class _CastVisit(torch.autograd.Function):
    """A copy of the weight in another precision, with the copy's gradient going to the weight's sum unrounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, entry: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(number)
        return weight.to(dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        (number,) = ctx.saved_tensors
        return None, add_visit_gradient(gradient, number), None, None


def new_entry(weight: Tensor, norms: VisitNorms | None = None, *, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """An entry, and the number of its sum."""
    visit_sum = VisitSum(norms, compiled=compiled)
    return _Entry.apply(weight, visit_sum), visit_sum.number  # type: ignore[no-untyped-call]


class VisitedWeight:
    """How one weight is used in visits. Belongs to the module that holds the weight.

    Outside of a pass, or without gradients, the weight is used as it is.
    """

    def __init__(self) -> None:
        self.visits: VisitPass | None = None
        self.entry: Tensor | None = None
        self.number: Tensor | None = None
        self.norms: VisitNorms | None = None
        """Set it to measure."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        self.enter(weight)
        if self.entry is None:
            return F.linear(x, weight)
        return _LinearVisit.apply(x, weight, self.entry, self.number)  # type: ignore[no-any-return, no-untyped-call]

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in this precision."""
        self.enter(weight)
        if self.entry is None:
            return weight.to(dtype)
        return _CastVisit.apply(weight, self.entry, self.number, dtype)  # type: ignore[no-any-return, no-untyped-call]

    def enter(self, weight: Tensor, *, compiled: bool = False) -> None:
        """Makes the weight's entry at its first visit in a pass.

        Not before: the gradient is handed over where the entry was made, and there ZeRO-3 has the weight in one piece.
        """
        if self.entry is None and self.visits is not None and weight.requires_grad and torch.is_grad_enabled():
            self.entry, self.number = self.visits.entries[self] = new_entry(weight, self.norms, compiled=compiled)

    def __deepcopy__(self, memo: dict[int, Any]) -> VisitedWeight:
        return VisitedWeight()  # a copied model is in no pass

    def __reduce__(self) -> tuple[type[VisitedWeight], tuple[()]]:
        return VisitedWeight, ()


class VisitPass:
    """One forward pass: the entries of the weights that it has visited."""

    def __init__(self) -> None:
        self.entries: dict[VisitedWeight, tuple[Tensor | None, Tensor | None]] = {}

    def begin(self, module: nn.Module, *, compiled: bool = False) -> None:
        """To be called before each visit of a module: its weights gather their gradients for this pass.

        Recomputation calls it too, so that a pass is recomputed with its own entries, whatever passes followed it.
        For a compiled visit, which cannot make entries at the weights' first use, they are made here.
        """
        for visited, weight in visited_weights(module):
            if torch.is_grad_enabled():
                visited.visits = self
                visited.entry, visited.number = self.entries.get(visited, (None, None))
                if compiled:
                    visited.enter(weight, compiled=True)
            else:
                visited.visits = visited.entry = visited.number = None


class Linear(nn.Linear):
    """A linear map without bias that one pass may apply many times."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.visited = VisitedWeight()

    def forward(self, input: Tensor) -> Tensor:
        return self.visited.linear(input, self.weight)


def visited_weights(module: nn.Module) -> Iterator[tuple[VisitedWeight, Tensor]]:
    """The weights in a module that visits use, with how they do."""
    for part in module.modules():
        visited = getattr(part, "visited", None)
        if isinstance(visited, VisitedWeight):
            yield visited, part.weight  # type: ignore[misc]


def add_to(total: Tensor, gradient: Tensor) -> None:
    """Adds in place. On a CPU, PyTorch would make a copy in the sum's precision: it makes it part by part instead."""
    if gradient.device.type != "cpu" or gradient.dtype == total.dtype:
        total.add_(gradient)
        return
    flat_total, flat_gradient = total.view(-1), gradient.reshape(-1)
    for start in range(0, flat_total.numel(), PART_ELEMENTS):
        flat_total[start : start + PART_ELEMENTS].add_(flat_gradient[start : start + PART_ELEMENTS])


def _added(total: Tensor | None, gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).double()
    return norm.square() if total is None else total + norm.square()
