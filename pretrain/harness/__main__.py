"""The `lm_eval` command with one more model, `deeploop`, and this folder's groups of tasks.

python -m pretrain.harness --model deeploop --model_args checkpoint=runs/small,rounds=8 --batch_size 16 \
    --tasks deeploop_0shot,deeploop_1shot

All other options are those of `lm_eval`, which has no way of its own to find models of other packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lm_eval.__main__ import cli_evaluate

import pretrain.harness.model  # noqa: F401  registers the model
from pretrain.errors import USER_ERRORS
from pretrain.exit_codes import Exit

TASKS = Path(__file__).with_name("tasks")


def main() -> int:
    """Returns the exit status: 0, or 2 for an error of the user's, told in one line."""
    if len(sys.argv) > 1 and sys.argv[1] not in ("ls", "validate") and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    try:
        cli_evaluate()
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        return Exit.USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
