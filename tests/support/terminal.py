"""A command in a pseudo-terminal, and what then stands on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path


def run_in_terminal(command: Sequence[str], *, folder: Path, columns: int = 120) -> tuple[int, str]:
    """Runs a command whose standard streams are a terminal of this width; its exit status, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, close_fds=True)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    return process.wait(), written.decode(errors="replace")


def screen(written: str) -> list[str]:
    """Lines as a person sees them at the end: a carriage return goes to the start of the line, and
    ESC [K clears the rest of it."""
    lines, column = [""], 0
    for character in written.replace("\x1b[K", "\0"):
        if character == "\0":
            lines[-1] = lines[-1][:column]
            continue
        if character == "\n":
            lines.append("")
        elif character == "\r":
            column = 0
            continue
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + character + line[column + 1 :]
            column += 1
            continue
        column = 0
    return [line.rstrip() for line in lines]
