"""A quick launcher: its command takes no time to start, for the ranks come from the test's own server of processes.

`python -m tests.support.launch ADDRESS RANKS -- arguments of run.py` asks the `Launches` that listen at ADDRESS. Like
torchrun it gives up when one rank fails: the others have `PATIENCE_SECONDS` to notice, then they are killed. When the
command itself is killed, so are they.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread

PATIENCE_SECONDS = 5.0


class Launches:
    """Serves the command while it is entered as a context, one launch at a time."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "launches")
        self._listener = Listener(self.address, "AF_UNIX")
        self._thread = Thread(target=self._serve, name="launches", daemon=True)

    def __enter__(self) -> Launches:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(OSError), Client(self.address, "AF_UNIX") as connection:
            connection.send(None)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as connection:
                asked = connection.recv()
                if asked is None:
                    return
                exit_code = launch(connection, *asked)
                with contextlib.suppress(OSError):
                    connection.send(exit_code)


def launch(command: Connection, world_size: int, arguments: list[str], log: str) -> int:
    """Runs the ranks to their end, or to the end of `command`; the exit status of the first that failed, or 0."""
    from tests.support.ranks import SERVER, free_port

    port = free_port()
    ranks = [SERVER.Process(target=_rank_main, args=(r, world_size, port, log, arguments)) for r in range(world_size)]
    for rank in ranks:
        rank.start()
    failed, deadline = 0, float("inf")
    while any(rank.is_alive() for rank in ranks):
        time.sleep(0.02)
        failed = failed or next((rank.exitcode % 256 for rank in ranks if rank.exitcode), 0)
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + PATIENCE_SECONDS
        if command.poll() or time.monotonic() > deadline:  # it says nothing more: there is the end of it to read
            for rank in ranks:
                rank.kill()
    return failed


def _rank_main(rank: int, world_size: int, port: int, log: str, arguments: list[str]) -> None:
    from pretrain import run
    from tests.support.ranks import become_rank

    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    become_rank(rank, world_size, port, stream, stream)
    status = 1
    try:
        status = run.main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    address, world_size, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[4:]
    with Client(address, "AF_UNIX") as connection:
        connection.send((world_size, arguments, str(Path("/proc/self/fd/1").readlink())))
        return int(connection.recv())


if __name__ == "__main__":
    sys.exit(main())
