"""A quick launcher: `python -m tests.support.launch RANKS -- arguments of run.py`. Imports once, forks the ranks.

Like torchrun it gives up when one rank fails: the others have `PATIENCE_SECONDS` to notice, then they are killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

PATIENCE_SECONDS = 5.0


def main() -> int:
    import deepspeed  # noqa: F401
    import torch

    from pretrain import run
    from tests.support.ranks import free_port

    world_size, arguments = int(sys.argv[1]), sys.argv[3:]
    port = free_port()
    ranks = set()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            torch.set_num_threads(1)
            status = 1
            try:
                status = run.main(arguments)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ranks.add(pid)
    failed = 0
    deadline = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, deadline = code % 256, time.monotonic() + PATIENCE_SECONDS
        elif deadline is not None and time.monotonic() > deadline:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            deadline = None
        else:
            time.sleep(0.02)
    return failed


if __name__ == "__main__":
    sys.exit(main())
