"""Batches for one rank: read ahead by a thread, in pinned memory where there is an accelerator.

Global batch s holds the samples at positions s*G .. s*G + G - 1. Of these, micro-batch a of rank r of W holds the B at
offsets (a*W + r)*B and after; so the content of a step is the same for every W and B, and the count of samples consumed
is the whole state.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.mixture import Mixture


@dataclass(frozen=True)
class Share:
    """This rank's part of each global batch, in samples."""

    global_batch: int
    micro_batch: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.global_batch % (self.micro_batch * self.world_size):
            raise DataError(
                f"global batch {self.global_batch} is no multiple of micro-batch {self.micro_batch} x "
                f"{self.world_size} ranks"
            )


class MicroBatch(NamedTuple):
    """Each int64 [micro_batch, context + 1], pinned where there is an accelerator."""

    tokens: torch.Tensor
    documents: torch.Tensor | None  # ids that attention may stay within, if they were asked for


class Feed:
    """Iterates over this rank's micro-batches from `consumed` samples on.

    `consumed` counts the samples of all ranks in the global batches that have been handed out completely. A fault
    of the reading thread is raised where its batch was due. Close it, or use it in a `with` block.
    """

    def __init__(
        self, mixture: Mixture, share: Share, consumed: int = 0, *, with_documents: bool = False, prefetch: int = 4
    ) -> None:
        if consumed % share.global_batch:
            raise DataError(f"{consumed} samples consumed is no multiple of the global batch {share.global_batch}")
        self._mixture = mixture
        self._share = share
        self._start = consumed
        self._handed_out = 0
        self._with_documents = with_documents
        self._pin = torch.cuda.is_available()
        self._ready: queue.Queue[MicroBatch | BaseException] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="data-feed", daemon=True)
        self._thread.start()

    @property
    def consumed(self) -> int:
        """Samples of whole global batches handed out, over all ranks: what a checkpoint stores."""
        per_step = self._share.global_batch // (self._share.micro_batch * self._share.world_size)
        return self._start + self._handed_out // per_step * self._share.global_batch

    def _positions(self) -> Iterator[NDArray[np.int64]]:
        share = self._share
        # Micro-batches of all ranks follow each other without a gap, also from one global batch to the next.
        start = self._start + share.rank * share.micro_batch
        for first in itertools.count(start, share.world_size * share.micro_batch):
            yield np.arange(first, first + share.micro_batch, dtype=np.int64)

    def _tensor(self, rows: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(rows)
        return tensor.pin_memory() if self._pin else tensor

    def _read(self) -> None:
        item: MicroBatch | BaseException
        for positions in self._positions():
            try:
                documents = self._tensor(self._mixture.document_ids(positions)) if self._with_documents else None
                item = MicroBatch(self._tensor(self._mixture.samples(positions)), documents)
            except BaseException as error:  # handed over to the thread that asks for the batch
                item = error
            while not self._stop.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._stop.is_set() or isinstance(item, BaseException):
                return

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> MicroBatch:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        self._handed_out += 1
        return item

    def close(self) -> None:
        """Ends the reading thread."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
