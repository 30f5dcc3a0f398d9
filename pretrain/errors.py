"""What a user can cause, and nothing else: each of these ends as one line on standard error."""

from __future__ import annotations

from data_prep.errors import DataError
from deeploop_model.errors import ModelConfigError
from pretrain.exit_codes import Exit


class PretrainError(Exception):
    """Root of this package's errors; the message is one line that says what to change."""

    exit_code = Exit.USER_ERROR


class ConfigError(PretrainError):
    """A YAML or ds_config key: names the file, the key, the value and what would work."""


class CheckpointError(PretrainError):
    """A checkpoint that cannot be used: names its folder and why."""


class SaveError(PretrainError):
    """The last checkpoint of a run could not be written, or its folder at the start for want of space."""

    exit_code = Exit.SAVE_FAILED


class DivergedError(PretrainError):
    """Going back to a checkpoint does not help any more."""

    exit_code = Exit.DIVERGED


class RanksDifferError(PretrainError):
    """Weights that must be equal on all ranks are not."""

    exit_code = Exit.RANKS_DIFFER


USER_ERRORS: tuple[type[Exception], ...] = (PretrainError, DataError, ModelConfigError)


def exit_code_of(error: Exception) -> Exit:
    """The status that a process leaves with after one of USER_ERRORS."""
    return error.exit_code if isinstance(error, PretrainError) else Exit.USER_ERROR
