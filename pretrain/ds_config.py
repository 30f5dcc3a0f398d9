"""The DeepSpeed configuration: JSON with "auto" values, resolved from the run's configuration and checked against it.

"auto" means what Hugging Face's DeepSpeed integration makes of it: batch sizes, accumulation, clipping and optimizer
values come from the run's own configuration, bucket sizes from the model's width. A value that is written out must
agree with the run's configuration; two truths are an error.

An `optimizer` block is taken in that sense: its values must be the YAML's, and the run builds its own AdamW from them
(`pretrain.engine`), the same on every device. DeepSpeed's Adam would be compiled at first use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeploop_model import recompute_choice
from pretrain.config import RunConfig
from pretrain.ds_schema import check_keys, check_values
from pretrain.errors import ConfigError
from pretrain.text_file import read_text

AUTO = "auto"
BELONGS_ELSEWHERE = {
    "scheduler": "the learning rate is set by the YAML's schedule section",
    "activation_checkpointing": "recomputation belongs to the model, set train.recompute",
}
OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay")


def load_ds_config(path: Path, config: RunConfig, world_size: int) -> dict[str, Any]:
    """The file's configuration with nothing left open. Raises ConfigError."""
    try:
        tree = json.loads(read_text(path), object_pairs_hook=_no_repeated_key)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(tree).__name__}")
    try:
        return resolve(tree, config, world_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def resolve(tree: dict[str, Any], config: RunConfig, world_size: int) -> dict[str, Any]:
    """A copy with "auto" replaced and what the run needs filled in. Raises ConfigError."""
    tree = json.loads(json.dumps(tree))
    _refuse(tree)
    tree.setdefault("train_batch_size", AUTO)
    tree.setdefault("train_micro_batch_size_per_gpu", AUTO)
    tree.setdefault("gradient_accumulation_steps", AUTO)
    tree.setdefault("gradient_clipping", AUTO)  # DeepSpeed's own default clips at 1.0
    # DeepSpeed's default, bf16, loses precision with every micro-batch and rank.
    tree.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    tree.setdefault("communication_data_type", "fp32")
    for dotted, value in _owned_by_the_run(config, world_size).items():
        _settle(tree, dotted, value)
    for dotted, value in _derived_from_width(config.model.d_model).items():
        _fill_auto(tree, dotted, value)
    left = next(_autos(tree, ""), None)
    if left is not None:
        raise ConfigError(f'{left}: "auto" cannot be resolved here; write a value')
    check_values(tree)
    if config.train.compile and tree.get("zero_optimization", {}).get("stage") == 3:
        raise ConfigError(
            "zero_optimization.stage: 3 gathers weights in hooks that a compiled block doesn't call; "
            "use stage 1 or 2, or set train.compile to false"
        )
    if config.train.recompute == recompute_choice.AUTO and not any(
        tree.get(name, {}).get("enabled") for name in ("bf16", "fp16")
    ):
        raise ConfigError("bf16.enabled: train.recompute auto predicts the memory of 16-bit weights; name a policy")
    tree.pop("optimizer", None)
    tree["zero_force_ds_cpu_optimizer"] = False  # offloaded state is updated by our AdamW as well
    tree.setdefault(
        "tensorboard", {"enabled": True, "output_path": str(Path(config.out) / "tensorboard"), "job_name": ""}
    )
    return tree


def accumulation_steps(config: RunConfig, world_size: int) -> int:
    """global batch / (micro batch * ranks). Raises ConfigError where that is not a whole number."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    per_pass = micro * world_size
    if batch % per_pass:
        nearest = max(1, round(batch / per_pass)) * per_pass
        raise ConfigError(
            f"train.global_batch_size: {batch} is not a multiple of train.micro_batch_size {micro} "
            f"x {world_size} ranks = {per_pass}; {nearest} would be"
        )
    return batch // per_pass


def _owned_by_the_run(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Values that the YAML states; the optimizer's hold only where the JSON has an optimizer block."""
    return {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps(config, world_size),
        "gradient_clipping": config.optimizer.gradient_clipping,
        "bf16.check_grad_overflow": True,  # DeepSpeed's default: a step with a non-finite gradient changes nothing
        "optimizer.params.lr": config.optimizer.lr,
        "optimizer.params.betas": list(config.optimizer.betas),
        "optimizer.params.eps": config.optimizer.eps,
        "optimizer.params.weight_decay": config.optimizer.weight_decay,
    }


def _derived_from_width(d_model: int) -> dict[str, Any]:
    """Hugging Face's formulas, which count parameters of a d x d matrix."""
    return {
        "bf16.enabled": True,
        "fp16.enabled": False,
        "zero_optimization.reduce_bucket_size": d_model * d_model,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * d_model * d_model),
        "zero_optimization.stage3_param_persistence_threshold": 10 * d_model,
    }


def _refuse(tree: dict[str, Any]) -> None:
    for block, instead in BELONGS_ELSEWHERE.items():
        if block in tree:
            raise ConfigError(f"{block}: {instead}; remove this block")
    check_keys(tree)
    if tree.get("fp16", {}).get("enabled") is True:
        raise ConfigError('fp16.enabled: true is not supported; use {"bf16": {"enabled": true}}')
    optimizer = tree.get("optimizer", {"type": "AdamW"})
    if optimizer.get("type") not in ("AdamW", "Adam"):
        raise ConfigError(
            f'optimizer.type: {optimizer.get("type")!r} is not supported; use "AdamW", or remove the block'
        )
    params = optimizer.get("params", {})
    if not isinstance(params, dict):
        raise ConfigError(f"optimizer.params: {params!r} must be an object of keys")
    for key in params:
        if key not in OPTIMIZER_PARAMS:
            raise ConfigError(f"optimizer.params.{key}: unknown key; known here: {', '.join(OPTIMIZER_PARAMS)}")


def _settle(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Fills "auto"; a value that is written out must equal `value`."""
    node, key = _find(tree, dotted)
    if node is None or key not in node:
        return
    found = node[key]
    if found == AUTO:
        node[key] = value
    elif not _equal(found, value):
        raise ConfigError(f'{dotted}: {found!r} differs from {value!r}, which the run\'s YAML means; write "auto"')


def _fill_auto(tree: dict[str, Any], dotted: str, value: Any) -> None:
    node, key = _find(tree, dotted)
    if node is not None and node.get(key) == AUTO:
        node[key] = value


def _find(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any] | None, str]:
    *sections, key = dotted.split(".")
    node: Any = tree
    for section in sections:
        node = node.get(section)
        if not isinstance(node, dict):
            return None, key
    return node, key


def _autos(node: Any, path: str) -> Iterator[str]:
    if node == AUTO:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _autos(child, f"{path}.{key}" if path else str(key))


def _equal(found: Any, value: Any) -> bool:
    if isinstance(found, bool) or isinstance(value, bool):
        return found is value
    if isinstance(found, int | float) and isinstance(value, int | float):
        return math.isclose(found, value, rel_tol=1e-12)
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(_equal, found, value))
    return bool(found == value)


def _no_repeated_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"{key}: is given twice")
        tree[key] = value
    return tree
