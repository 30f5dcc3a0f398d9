"""What DeepSpeed accepts: keys and types of a ds_config, checked before any process group exists.

DeepSpeed 0.19.8 ignores top-level keys that it does not know, and tells faults inside a section by a traceback of its
own models. Here both are one line.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from pretrain.errors import ConfigError

SECTIONS = (
    "optimizer", "bf16", "fp16", "data_types", "torch_autocast", "zero_optimization", "aio", "comms_logger", "compile",
    "checkpoint", "datastates_ckpt", "timers", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet",
)  # fmt: skip
VALUES = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type", "prescale_gradients",
    "gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather", "disable_python_gc", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level",
)  # fmt: skip
FLOAT_TYPES = ("fp32", "bf16", "fp16")


def check_keys(tree: dict[str, Any]) -> None:
    """Raises ConfigError for a top-level key that DeepSpeed would ignore, or a section that is no object."""
    for key, value in tree.items():
        if key not in SECTIONS + VALUES:
            close = difflib.get_close_matches(key, SECTIONS + VALUES, n=1)
            raise ConfigError(f"{key}: unknown key; " + (f"did you mean {close[0]!r}?" if close else "remove it"))
        if key in SECTIONS and not isinstance(value, dict):
            raise ConfigError(f"{key}: {value!r} must be an object of keys")


def check_values(tree: dict[str, Any]) -> None:
    """Raises ConfigError for what DeepSpeed would not take. `tree` passed `check_keys` and holds no "auto" any more."""
    _check_sections(tree)
    for dotted, value in (
        ("data_types.grad_accum_dtype", tree.get("data_types", {}).get("grad_accum_dtype", "fp32")),
        ("communication_data_type", tree.get("communication_data_type", "fp32")),
    ):
        if value not in FLOAT_TYPES:
            raise ConfigError(f"{dotted}: {value!r} must be one of {', '.join(FLOAT_TYPES)}")


def _check_sections(tree: dict[str, Any]) -> None:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    for prefix, parse in (
        ("zero_optimization.", get_zero_config),
        ("bf16.", get_bfloat16_config),
        ("fp16.", get_float16_config),
        ("", get_monitor_config),
    ):
        try:
            parse(tree)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            dotted = prefix + ".".join(map(str, fault["loc"]))
            if fault["type"] == "extra_forbidden":
                raise ConfigError(f"{dotted}: unknown key") from None
            raise ConfigError(f"{dotted}: {fault['input']!r}: {fault['msg']}") from None
