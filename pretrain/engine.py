"""The DeepSpeed engine: parameter groups, optimizer, and one training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from deeploop_model import DeepLoopModel
from deeploop_model.compilation import compiled_block, missing_compiler
from pretrain.config import OptimizerConfig, RunConfig, TrainConfig
from pretrain.data_feed import Batch
from pretrain.monitor.step_times import StepTimes

Engine = Any  # deepspeed.DeepSpeedEngine carries no types


def build_engine(model: DeepLoopModel, config: RunConfig, ds_config: dict[str, Any]) -> Engine:
    """The engine that owns the model's weights, their fp32 masters, gradients and optimizer state."""
    import deepspeed

    groups = parameter_groups(model, config.optimizer.weight_decay)
    engine, *_ = deepspeed.initialize(
        model=model,
        config=ds_config,
        model_parameters=groups,
        optimizer=build_optimizer(groups, config.optimizer),
    )
    spare_the_run(engine.monitor)
    return engine


def spare_the_run(monitor: Any) -> None:
    """Lets points be lost on a full disk: the engine writes some of its own in every step, and would end the run."""
    write = monitor.write_events

    def write_events(*args: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            write(*args, **options)

    monitor.write_events = write_events


def compile_blocks(model: DeepLoopModel, device: torch.device) -> str:
    """Compiles the model's block, if there is a compiler. Returns a line that says what was done."""
    missing = missing_compiler(device)
    if missing is not None:
        return f"train.compile: {missing}; going on without"
    model.block_step = compiled_block()
    return "train.compile: the first step compiles the block"


def parameter_groups(model: DeepLoopModel, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norm weights) don't. Frozen weights are in no group."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay, "name": "matrices"},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "name": "vectors"},
    ]
    return [group for group in groups if group["params"]]  # ZeRO cannot flatten an empty group


def build_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, fused: the form that exists for CPU tensors as well, and so for offloaded optimizer state."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(engine: Engine, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def train_step(
    engine: Engine,
    micro_batches: Iterable[Batch],
    num_rounds: int,
    train: TrainConfig,
    times: StepTimes | None = None,
    before_update: Callable[[], None] | None = None,
) -> Tensor:
    """Forward and backward of `num_rounds` rounds over this rank's micro-batches, then one optimizer step.

    `before_update` is called once the global batch's gradients are there. Returns this rank's mean loss of the last
    round, a scalar on the device.
    """
    losses = []
    times = StepTimes(torch.device("cpu")) if times is None else times
    for batch in times.each(micro_batches):
        with times.of("forward"):
            output = engine(
                batch.tokens_BT,
                batch.targets_BT,
                num_rounds=num_rounds,
                documents_BT=batch.documents_BT,
                backprop_rounds=train.backprop_rounds,
                round_loss=train.round_loss,
                z_loss=train.z_loss,
            )
        with times.of("backward"):
            engine.backward(nan_unless_finite(output.loss))
        if before_update is not None and engine.is_gradient_accumulation_boundary():
            before_update()
        with times.of("optimizer"):
            engine.step()  # updates weights at the last micro-batch only
        losses.append(output.last_loss)
    return torch.stack(losses).mean()


def nan_unless_finite(loss: Tensor) -> Tensor:
    """The same loss, whose gradient is NaN everywhere where it is not finite.

    An infinite loss can have finite gradients. Made NaN, they reach every rank's share of the reduced gradient, and
    DeepSpeed skips the update on all of them.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def update_skipped(engine: Engine) -> bool:
    """Whether the last step left the weights alone because a gradient was not finite; the same on all ranks."""
    return bool(engine.optimizer.overflow)
