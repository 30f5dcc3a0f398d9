"""The progress line: MB/s, tokens/s and time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import numpy as np
from tqdm import tqdm

from data_prep.tokenizing.ranks import Rank
from data_prep.tokenizing.worker import PieceResult

_LOG_SECONDS = 30.0  # between lines where standard error is a file


class Display:
    """Counts input (bytes, or rows of a table) and tokens of this process."""

    def __init__(self, total: int, rank: Rank, unit: str) -> None:
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total or None,
            unit=unit,
            unit_scale=True,
            mininterval=0.5 if terminal else _LOG_SECONDS,
            desc=f"rank {rank.rank}" if rank.world_size > 1 else None,
            delay=0 if terminal else _LOG_SECONDS,
        )
        self._tokens = 0
        self._begun = time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def skip(self, done: int) -> None:
        """Input done by an earlier process; not part of the speed."""
        self._bar.initial += done
        self._bar.update(done)

    def add(self, input_bytes: int, result: PieceResult) -> None:
        """One more piece."""
        for part in result.splits.values():
            self._tokens += int(np.frombuffer(part.lengths, "<i4").sum(dtype=np.int64))
        rate = self._tokens / max(1e-9, time.monotonic() - self._begun)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(input_bytes)
