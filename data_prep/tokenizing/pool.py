"""Worker processes whose results come back in order, with a bound on what is under way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from data_prep.errors import DataError
from data_prep.tokenizing.worker import WorkerSetup, start_worker

Task = TypeVar("Task")
Result = TypeVar("Result")
_AHEAD = 4  # pieces per worker handed out at once


class Pool:
    """Runs tasks on `workers` processes."""

    def __init__(self, executor: ProcessPoolExecutor, workers: int) -> None:
        self._executor = executor
        self._ahead = _AHEAD * workers

    def in_order(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Task, tuple[Any, ...]]]
    ) -> Iterator[tuple[Task, Result]]:
        """Yields (label, result) for each (label, arguments), in the order of the tasks.

        Raises:
            DataError: from a task, or because a worker process died.
        """
        waiting: deque[tuple[Task, Future[Result]]] = deque()
        try:
            for label, arguments in tasks:
                waiting.append((label, self._executor.submit(function, *arguments)))
                if len(waiting) >= self._ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process ended by itself (out of memory, or killed); run the same command again to go on"
            ) from error


@contextmanager
def worker_pool(setup: WorkerSetup, workers: int) -> Iterator[Pool]:
    """A pool for the time of the block."""
    executor = ProcessPoolExecutor(workers, get_context("spawn"), initializer=start_worker, initargs=(setup,))
    try:
        yield Pool(executor, workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def default_workers(processes_here: int) -> int:
    """Cores this process may use, shared among the processes of one machine."""
    return max(1, len(os.sched_getaffinity(0)) // processes_here)
