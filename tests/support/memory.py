"""What this process holds."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process, of proc(5)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
