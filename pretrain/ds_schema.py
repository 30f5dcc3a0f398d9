"""What DeepSpeed accepts: keys and types of a ds_config, checked before any process group exists.

DeepSpeed 0.19.8 ignores top-level keys that it does not know, and tells faults inside a section by a traceback of its
own models. Here both are one line.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from pretrain.errors import ConfigError

TOP_LEVEL_KEYS = (
    # Batches and the optimizer
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    # Precision
    "bf16", "fp16", "data_types", "torch_autocast",
    # Memory and communication
    "zero_optimization", "aio", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "gradient_allreduce_op", "disable_allgather", "comms_logger", "compile", "disable_python_gc",
    # Checkpoints
    "checkpoint", "datastates_ckpt",
    # What is shown
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers",
    "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet",
)  # fmt: skip
FLOAT_TYPES = ("fp32", "bf16", "fp16")


def check_schema(tree: dict[str, Any]) -> None:
    """Raises ConfigError for a key that DeepSpeed would ignore and for a value that it would not take.

    `tree` holds no "auto" any more.
    """
    for key in tree:
        if key not in TOP_LEVEL_KEYS:
            close = difflib.get_close_matches(key, TOP_LEVEL_KEYS, n=1)
            raise ConfigError(f"{key}: unknown key; " + (f"did you mean {close[0]!r}?" if close else "remove it"))
    _check_sections(tree)
    accumulated = tree.get("data_types", {}).get("grad_accum_dtype")
    for dotted, value in (
        ("data_types.grad_accum_dtype", accumulated),
        ("communication_data_type", tree.get("communication_data_type")),
    ):
        if value is not None and value not in FLOAT_TYPES:
            raise ConfigError(f"{dotted}: {value!r} must be one of {', '.join(FLOAT_TYPES)}")


def _check_sections(tree: dict[str, Any]) -> None:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    for section in ("zero_optimization", "bf16", "fp16", "data_types", "tensorboard", "wandb", "csv_monitor", "comet"):
        if not isinstance(tree.get(section, {}), dict):
            raise ConfigError(f"{section}: {tree[section]!r} must be an object of keys")
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
