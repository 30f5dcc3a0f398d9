"""What a configuration amounts to, without its weights: depth, constants, parameters, FLOPs, memory, initial spreads.

    python -m deeploop_model.describe --config pretrain/configs/gpt2_medium.yaml num_rounds=7
    python -m deeploop_model.describe --preset huginn-like

The model is built on PyTorch's meta device, which has shapes and no storage: 100 billion parameters take seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from deeploop_model.config import DeepLoopConfig
from deeploop_model.errors import ModelConfigError
from deeploop_model.flops import attention_flops, forward_flops, train_flops
from deeploop_model.init import initial_matrices
from deeploop_model.memory import ActivationBytes, Precision, activation_bytes, kv_cache_bytes
from deeploop_model.model import DeepLoopModel
from deeploop_model.presets import PRESETS, preset_fields
from deeploop_model.recompute import POLICIES

USER_ERROR_EXIT = 2


@dataclass(frozen=True)
class MatrixSummary:
    """Matrices of one shape and one initial spread in one part of the model."""

    name: str
    count: int
    shape: tuple[int, ...]
    std: float


@dataclass(frozen=True)
class Description:
    """All figures of a configuration. FLOPs and bytes are per token, at the R and context length of training."""

    config: DeepLoopConfig
    stored_parameters: int
    unrolled_parameters: int
    """Of the stack without sharing that does the same computation: every round with its own copy."""
    forward_flops: int
    train_flops: int
    attention_flops: int
    """The part of forward_flops that grows with the context length."""
    activations: dict[str, ActivationBytes]
    """By recompute policy, with bf16 weights and a float32 stream."""
    kv_cache_bytes: int
    """With bf16 keys and values."""
    matrices: list[MatrixSummary]


def describe(config: DeepLoopConfig) -> Description:
    """The figures of `config`, computed without allocating its weights."""
    with torch.device("meta"):
        model = DeepLoopModel(config)
    stored = sum(weight.numel() for weight in model.parameters())
    looped = sum(w.numel() for part in (model.blocks, model.injection) if part is not None for w in part.parameters())
    precision = Precision()
    return Description(
        config=config,
        stored_parameters=stored,
        unrolled_parameters=stored + (config.num_rounds - 1) * looped,
        forward_flops=forward_flops(config),
        train_flops=train_flops(config),
        attention_flops=config.unrolled_depth * attention_flops(config, config.context_length),
        activations={policy: activation_bytes(config, policy, precision) for policy in POLICIES},
        kv_cache_bytes=kv_cache_bytes(config, precision.weight),
        matrices=matrix_summaries(model),
    )


def matrix_summaries(model: DeepLoopModel) -> list[MatrixSummary]:
    """Initial matrices; those of the blocks of one stack, equal in shape and spread, are one entry."""
    counts: dict[tuple[str, tuple[int, ...], float], int] = {}
    for matrix in initial_matrices(model):
        part, *rest = matrix.name.split(".")
        name = ".".join([part, "*", *rest[1:]]) if rest and rest[0].isdigit() else matrix.name
        key = (name, tuple(matrix.weight_OI.shape), matrix.std)
        counts[key] = counts.get(key, 0) + 1
    return [MatrixSummary(name, count, shape, std) for (name, shape, std), count in counts.items()]


def render(description: Description) -> str:
    """The description as text, a figure a line."""
    config, rule = description.config, description.config.rule
    structure = (
        f"K = {config.num_blocks} blocks, R = {config.num_rounds} rounds, prelude {config.num_prelude_blocks}, "
        f"coda {config.num_coda_blocks}: N = {config.unrolled_depth}, M = {config.num_visits} visits"
    )
    heads = f"{config.num_heads} heads of {config.head_dim}"
    if config.kv_heads != config.num_heads:
        heads += f", {config.kv_heads} key-value heads"
    attention = description.attention_flops / description.forward_flops
    lines = [
        structure,
        f"width {config.d_model}, {heads}, feed-forward {config.feed_forward} {config.feed_forward_width}, "
        f"position {config.position}, injection {config.injection}",
        f"vocabulary {config.vocab_size:,} (stored {config.padded_vocab_size:,}), context {config.context_length:,}",
        f"residual {config.residual}: alpha {rule.alpha:.6g}, beta {rule.beta:.6g}, norm {rule.norm}"
        + (f", output matrices x {rule.output_gain:.6g}" if rule.output_gain != 1 else ""),
        f"parameters stored {description.stored_parameters:,}, unrolled-equivalent {description.unrolled_parameters:,}",
        f"FLOPs per token: forward {description.forward_flops:.4g}, train {description.train_flops:.4g}; "
        f"attention's T x T products are {attention:.1%} of it (a causal kernel does half of them)",
        f"KV cache per token, bf16: {size(description.kv_cache_bytes)}",
        "activations, bf16 weights and float32 stream, per token and per sequence of the context length:",
    ]
    for policy, held in description.activations.items():
        lines.append(
            f"  recompute {policy:<9} kept {size(held.kept):>10} {size(held.kept * config.context_length):>10}"
            f"   at most {size(held.peak):>10} {size(held.peak * config.context_length):>10}"
        )
    lines.append("initial matrices (count, shape, standard deviation):")
    width = max(len(matrix.name) for matrix in description.matrices)
    for m in description.matrices:
        shape = " x ".join(f"{n:,}" for n in m.shape)
        lines.append(f"  {m.name:<{width}}  {m.count:>4}  {shape:>17}  {m.std:.6g}")
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def config_of(fields: dict[str, Any]) -> DeepLoopConfig:
    """The config of plain values, `preset` among them. Raises ModelConfigError with the key in front."""
    fields = {**preset_fields(fields["preset"]), **fields} if "preset" in fields else dict(fields)
    fields.pop("preset", None)
    known = [field.name for field in dataclasses.fields(DeepLoopConfig)]
    for key in fields:
        if key not in known:
            raise ModelConfigError(f"{key}: unknown key; known here: preset, {', '.join(known)}")
    try:
        return TypeAdapter(DeepLoopConfig).validate_python(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        for fault in faults:
            own_check = fault.get("ctx", {}).get("error")
            if isinstance(own_check, ModelConfigError):
                raise own_check from None
        fault = faults[0]
        key = ".".join(str(part) for part in fault["loc"][:1])
        raise ModelConfigError(f"{key}: {fields[key]!r}: {fault['msg']}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the description. Returns the exit status: 0, or 2 for an error of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m deeploop_model.describe", description="What a configuration amounts to, without its weights."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE.yaml", help="a run's file; its model section is read")
    source.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the model section")
    args = parser.parse_intermixed_args(argv)
    try:
        fields = read_model_section(args.config) if args.config else {"preset": args.preset}
        for override in args.overrides:
            key, equals, text = override.removeprefix("model.").partition("=")
            if not equals:
                raise ModelConfigError(f"override {override!r}: must look like key=value")
            fields[key] = read_yaml(text, f"override {override!r}")
        sys.stdout.write(render(describe(config_of(fields))) + "\n")
    except ModelConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR_EXIT
    return 0


def read_model_section(path: Path) -> dict[str, Any]:
    """The `model` section of a run's YAML file; an absent one is that of all defaults."""
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    section = tree.get("model", {}) if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        raise ModelConfigError(f"{path}: must hold a section `model` of keys")
    return dict(section)


def read_yaml(text: str, source: str) -> Any:
    """Raises ModelConfigError, naming `source`, for text that is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ModelConfigError(f"{source}: is not YAML: {problem}") from None


if __name__ == "__main__":
    sys.exit(main())
