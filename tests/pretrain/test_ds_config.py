""" "auto" values, agreement with the run's YAML, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import RunConfig
from pretrain.config_file import check_config
from pretrain.ds_config import load_ds_config, resolve
from pretrain.errors import ConfigError
from tests.support.runs import DS_CONFIGS, small_tree


@pytest.fixture
def config(dataset: Path, tmp_path: Path) -> RunConfig:
    return check_config(small_tree(tmp_path / "out", dataset), "test.yaml")


def test_batch_sizes_and_clipping(config: RunConfig) -> None:
    expected = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    for tree in ({}, dict.fromkeys(expected, "auto"), expected):
        resolved = resolve(dict(tree), config, world_size=2)
        assert {key: resolved[key] for key in expected} == expected


@pytest.mark.parametrize(
    "params",
    [
        {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        {},
    ],
)
def test_optimizer_block_must_agree_and_is_ours_to_build(config: RunConfig, params: dict[str, Any]) -> None:
    assert resolve({"optimizer": {"type": "AdamW", "params": params}}, config, 1) == resolve({}, config, 1)


def test_gradients_are_summed_in_float32_unless_the_file_says_otherwise(config: RunConfig) -> None:
    resolved = resolve({}, config, 1)
    assert (resolved["data_types"], resolved["communication_data_type"]) == ({"grad_accum_dtype": "fp32"}, "fp32")
    resolved = resolve({"data_types": {"grad_accum_dtype": "bf16"}}, config, 1)
    assert resolved["data_types"] == {"grad_accum_dtype": "bf16"}


def test_buckets_by_hugging_faces_formulas(config: RunConfig) -> None:
    zero: dict[str, Any] = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    resolved = resolve({"zero_optimization": zero, "bf16": {"enabled": "auto"}}, config, 1)
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert resolved["zero_optimization"]["stage3_prefetch_bucket_size"] == 921
    assert resolved["zero_optimization"]["stage3_param_persistence_threshold"] == 320
    assert resolved["bf16"] == {"enabled": True}


def test_tensorboard_goes_to_the_run_folder_unless_configured(config: RunConfig) -> None:
    assert resolve({}, config, 1)["tensorboard"]["output_path"] == f"{config.out}/tensorboard"
    assert resolve({"tensorboard": {"enabled": False}}, config, 1)["tensorboard"] == {"enabled": False}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train_batch_size": 16}, "train_batch_size: 16 differs from 8"),
        ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5 differs from 1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}, "optimizer.params.lr: 0.0003 differs from 0.01"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type: 'Lamb' is not supported"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "scheduler: the learning rate is set by the YAML's schedule section; remove",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled: true is not supported"),
        ({"activation_checkpointing": {}}, "activation_checkpointing: .* set train.recompute"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage: "auto" cannot be resolved'),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad: unknown key"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params: 3 must be an object of keys"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage: 7: Input should be 0, 1, 2, 3"),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com: unknown key"),
        ({"data_types": "fp32"}, "data_types: 'fp32' must be an object of keys"),
        ({"flops_profiler": True}, "flops_profiler: True must be an object of keys"),
        ({"communication_data_type": 32}, "communication_data_type: 32 must be one of fp32, bf16, fp16"),
        ({"zero_optimization": 2}, "zero_optimization: 2 must be an object of keys"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled: 'perhaps': Input should be a valid boolean"),
        ({"tensorboard": {"enable": True}}, "tensorboard.enable: unknown key"),
        ({"data_types": {"grad_accum_dtype": "fp31"}}, "grad_accum_dtype: 'fp31' must be one of fp32, bf16, fp16"),
    ],
)
def test_contradictions(config: RunConfig, tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tree, config, world_size=2)


def test_compiled_blocks_exclude_zero3(config: RunConfig) -> None:
    compiled = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=True))
    with pytest.raises(ConfigError, match=r"zero_optimization.stage: 3 gathers weights .* use stage 1 or 2, or set"):
        resolve({"zero_optimization": {"stage": 3}}, compiled, 2)
    resolve({"zero_optimization": {"stage": 2}}, compiled, 2)


def test_files_that_cannot_be_read(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for text, message in [
        ('{"a": 1,\n "b": }', "line 2: Expecting value"),
        ('{"a": 1, "a": 2}', "a: is given twice"),
        ("[]", "must hold a JSON object"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"ds.json: {message}"):
            load_ds_config(path, config, 1)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_ds_config(tmp_path / "none.json", config, 1)


@pytest.mark.parametrize("path", sorted(DS_CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_our_files_keep_gradients_in_float32_and_resolve(config: RunConfig, path: Path) -> None:
    resolved = load_ds_config(path, config, world_size=2)
    assert resolved["bf16"]["enabled"] is True
    assert resolved["data_types"]["grad_accum_dtype"] == "fp32"
    assert resolved["communication_data_type"] == "fp32"
    assert '"auto"' not in json.dumps(resolved)
