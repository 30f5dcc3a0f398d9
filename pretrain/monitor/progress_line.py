"""One steady line at the foot of a terminal, and everything else above it."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile
from tqdm.contrib.logging import logging_redirect_tqdm
from tqdm.utils import ObjectWrapper

ERASE = "\x1b[K"
"""Tells a terminal to clear the rest of the line."""
FORMAT = "{desc} |{bar:20}| {percentage:3.0f} %"


class ProgressLine:
    """Draws on standard output where that is a terminal, and does nothing but print lines where it is none.

    What this process prints, warns or logs goes above the line. So it does in the run's other processes, which have the
    same terminal and an object of this class that draws nothing. A terminal that is gone stops nothing.

    Args:
        steps: of the whole run.
        wanted: whether this process draws and says anything.
    """

    def __init__(self, first_step: int, steps: int, *, wanted: bool) -> None:
        self._wanted = wanted
        self._bar: tqdm[Any] | None = None
        self._redirected = contextlib.ExitStack()
        terminal: TextIO = sys.stdout
        if not terminal.isatty():
            return
        above: Any = DummyTqdmFile(terminal) if wanted else _OverTheLine(terminal)
        if wanted:
            self._bar = tqdm(
                initial=first_step, total=steps, file=terminal, dynamic_ncols=True, bar_format=FORMAT,
                delay=1e-3,  # nothing is drawn before the first step is done
            )  # fmt: skip
            loggers = [logging.getLogger(name) for name in ("", "DeepSpeed")]
            self._redirected.enter_context(logging_redirect_tqdm(loggers))
            self._terminal = terminal
        self._redirected.enter_context(contextlib.redirect_stdout(above))
        self._redirected.enter_context(contextlib.redirect_stderr(above))

    @property
    def live(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._bar is not None

    def show(self, step: int, text: str) -> None:
        """The run is at `step`, about which there is this to say."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.set_description_str(text, refresh=False)
                if step < self._bar.n:  # the run went back
                    self._bar.n = step
                self._bar.update(step - self._bar.n)

    def say(self, line: str) -> None:
        """A line that stays. A launcher that is gone, and its pipe with it, stops nothing."""
        if not self._wanted:
            return
        with contextlib.suppress(OSError):
            if self._bar is not None:
                tqdm.write(line, file=self._terminal)
            else:
                print(line, flush=True)

    def close(self) -> None:
        """Leaves the last state of the line where it is."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.refresh()
                self._bar.close()
            self._bar = None
        self._redirected.close()


class _OverTheLine(ObjectWrapper):
    """A terminal on which another process draws a line: whole lines take its place, and it is drawn again below."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__(terminal)
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._wrapped.write(f"\r{ERASE}{line}\n")
        return len(text)
