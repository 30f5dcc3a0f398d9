"""Entry point of `python -m data_prep`."""

from __future__ import annotations

import sys

from data_prep.cli import main

if __name__ == "__main__":
    sys.exit(main())
