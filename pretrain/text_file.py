"""Reading a configuration file as text, with faults told as errors of the configuration."""

from __future__ import annotations

from pathlib import Path

from pretrain.errors import ConfigError


def read_text(path: Path) -> str:
    """The whole file, which must be UTF-8. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
