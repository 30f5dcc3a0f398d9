"""The looped language model and its mathematics: no processes, no files."""

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError
from deeploop_model.model import DeepLoopModel, ModelOutput
from deeploop_model.presets import PRESETS, preset
from deeploop_model.residual import ExponentRule, ResidualRule, residual_rule

__all__ = [
    "PRESETS",
    "DeepLoopConfig",
    "DeepLoopModel",
    "ExponentRule",
    "ModelConfigError",
    "ModelOutput",
    "ResidualRule",
    "preset",
    "residual_rule",
]
