"""What a user can cause, and nothing else: each of these ends as one line on standard error."""

from __future__ import annotations

from data_prep.errors import DataError
from deeploop_model.errors import ModelConfigError


class PretrainError(Exception):
    """Root of this package's errors; the message is one line that says what to change."""


class ConfigError(PretrainError):
    """A YAML or ds_config key: names the file, the key, the value and what would work."""


class CheckpointError(PretrainError):
    """A checkpoint that cannot be used: names its folder and why."""


USER_ERRORS: tuple[type[Exception], ...] = (PretrainError, DataError, ModelConfigError)
