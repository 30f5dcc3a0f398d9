"""The run's configuration: one frozen dataclass per section of the YAML file.

`pretrain.config_file` turns a file and dotted overrides into a `RunConfig`; nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, Discriminator, Tag, with_config

from deeploop_model import DeepLoopConfig
from deeploop_model.round_loss import RoundLoss
from pretrain.rounds import Rounds

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Text = Annotated[str, MinLen(1)]
Fraction = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class WeightedDataset:
    """One dataset of a mixture."""

    path: Text
    weight: Annotated[float, Gt(0)]
    """Its share of the samples, relative to the others' weights."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens are."""

    path: Annotated[
        Annotated[Text, Tag("one")] | Annotated[tuple[WeightedDataset, ...], MinLen(1), Tag("several")],
        Discriminator(
            lambda value: {str: "one", list: "several", tuple: "several"}.get(type(value)),
            custom_error_type="data",
            custom_error_message="a folder or a list of {path: ..., weight: ...}",
        ),
    ]
    """A dataset folder that `python -m data_prep tokenize` wrote, or a list of {path: ..., weight: ...}."""
    separate_documents: bool = False
    """Whether attention and positions stay within each document of a window, in training and validation."""

    @property
    def sources(self) -> tuple[WeightedDataset, ...]:
        return (WeightedDataset(self.path, 1.0),) if isinstance(self.path, str) else self.path


@dataclass(frozen=True)
class TrainConfig:
    """How much to train, and in what portions."""

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Count
    """Sequences per optimizer step, over all ranks and accumulation steps."""
    micro_batch_size: Count
    """Sequences per forward pass on one rank; global / (micro * ranks) is the number of accumulation steps."""
    seed: CountOrZero = 0
    """Of the initial weights, the data order and drawn numbers of rounds."""
    rounds: Rounds = "fixed"
    """Rounds of each training step, see `pretrain.rounds`. fixed: model.num_rounds, which sets alpha and beta, and is
    what validation and the sample run, in any case."""
    backprop_rounds: Count | None = None
    """Back-propagation passes through this many last rounds; None for all. Bounds memory and time for large R."""
    round_loss: RoundLoss = "last"
    """Which rounds are read out for the loss, see `deeploop_model.round_loss`. metrics.jsonl's `loss` is the last's."""
    initial_weights: Text | None = None
    """A checkpoint, or a run folder for its newest, whose weights step 0 starts from; None for random ones."""
    z_loss: Annotated[float, Ge(0)] = 0.0
    """Factor of the mean squared log-partition that is added to the loss, 1e-4 where it is used; it keeps logits small.
    metrics.jsonl's `loss` is without it."""
    trainable: tuple[str, ...] = ("*",)
    """Name patterns of the weights that learn, see `pretrain.freezing`."""
    frozen: tuple[str, ...] = ()
    """Name patterns of weights that don't, whatever `trainable` says."""
    recompute: str = "round"
    """What the backward pass computes again, see `deeploop_model.recompute`. auto: the cheapest that fits
    activation_gib."""
    activation_gib: Annotated[float, Gt(0)] | None = None
    """For recompute auto: memory of a rank, in GiB, that activations and gradients on their way may take."""
    compile: bool = False
    """Whether `torch.compile` makes faster code of the block, once for all visits; the first step takes that long."""
    validate_every: CountOrZero = 500
    """Steps between validations; 0 for none. The last step is validated as well."""
    validation_samples: Count = 2048
    """Sequences of the validation split to use, spread evenly over it; all of them where it has fewer."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019). Weight decay reaches matrices only, not norm weights."""

    lr: Annotated[float, Gt(0)] = 6e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    eps: Annotated[float, Gt(0)] = 1e-8
    weight_decay: Annotated[float, Ge(0)] = 0.1
    gradient_clipping: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0 for no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate by step, see `pretrain.schedule`."""

    kind: Literal["cosine", "wsd"] = "cosine"
    """cosine: one half wave from peak to final. wsd: warm-up, stable, then a linear decay."""
    warmup_steps: CountOrZero = 2000
    final_lr_fraction: Fraction = 0.05
    """Learning rate at the last step, as a part of the peak."""
    decay_steps: CountOrZero | None = None
    """wsd only: length of the final decay; a fifth of the run by default."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and where to start from."""

    every: CountOrZero = 1000
    """Steps between checkpoints; 0 for the last step only."""
    resume: Text = "auto"
    """auto: the run folder's newest whole checkpoint, if any. never: start at step 0. Or the path of a checkpoint."""
    background: bool = True
    """Training goes on while a checkpoint is written, for the price of one copy of it in host memory."""
    keep_last: Count = 3
    """Newest checkpoints to keep; older ones are deleted after a newer one is on disk."""
    keep_every: CountOrZero = 0
    """Checkpoints of a multiple of this many steps are kept for ever; 0 for none."""
    allow_differences: tuple[str, ...] = ()
    """Keys in which a run may differ from the checkpoint it goes on from, as a refusal names them."""


@dataclass(frozen=True)
class RecoveryConfig:
    """What the run does about failures: bad steps, hangs, the end of its time."""

    max_bad_steps: CountOrZero = 3
    """Bad steps in a row that the run goes on through; one more rolls it back. See `pretrain.bad_steps`."""
    spike_nats: Annotated[float, Gt(0)] = 1.0
    """A step is bad when its loss is this much above the median of the last `spike_window` good ones."""
    spike_window: Count = 64
    max_rollbacks: CountOrZero = 5
    """To the same checkpoint; one more ends the run."""
    collective_seconds: Annotated[float, Gt(0)] = 600.0
    """A collective of training that waits longer for another rank fails."""
    checkpoint_seconds: Annotated[float, Gt(0)] = 3600.0
    """The same while a checkpoint is read or written; also the limit for the first step, validation and sampling."""
    hang_factor: Annotated[float, Gt(1)] = 10.0
    """A step that takes this many times the median step is a hang: stacks are written, the run ends."""
    hang_min_seconds: Annotated[float, Gt(0)] = 120.0
    """No step is a hang before this."""
    heartbeat_seconds: Annotated[float, Gt(0)] = 10.0
    """Between writes of `logs/heartbeat_rank00000.json`, one file a rank."""
    stop_after_minutes: Annotated[float, Gt(0)] | None = None
    """Save and leave after this long, as on SIGTERM; for queues with a time limit."""
    compare_ranks_every: CountOrZero = 1000
    """Steps between comparisons of the weights' hash over all ranks; 0 for none."""


@dataclass(frozen=True)
class MonitorConfig:
    """What is shown and written while the run goes on."""

    log_every: Count = 10
    """Steps between lines of metrics.jsonl, TensorBoard points and progress lines."""
    kappa_every: CountOrZero = 0
    """Steps between measurements of how aligned the visits' gradients are, see `deeploop_model.visit_alignment`; 0 for
    none. A measured step takes a norm of each matrix and round longer."""
    loop_health_every: CountOrZero = 100
    """Steps between measurements of states, predictions and attention by round, see `deeploop_model.loop_health`; 0 for
    none. `docs/monitoring.md` says what one costs: a part of a step."""
    loop_health_sequences: Count = 2
    """Sequences that each rank measures, the same ones every time."""
    collapse_entropy: Annotated[float, Ge(0)] = 0.05
    """Attention entropy in nats, a mean over a block's heads, under which a warning is due; 0 for none."""
    collapse_change: Annotated[float, Ge(0)] = 1e-5
    """Relative change of a block's state from one round to the next, under which a warning is due; 0 for none.
    Untrained DeepLoop branches are small: the change is 2e-4 at K = 48, R = 3."""
    detail_every: CountOrZero = 100
    """Steps between measurements of gradient norms by sub-layer and of the time of collectives, which run one by one in
    such a step; 0 for none."""
    peak_tflops: Annotated[float, Gt(0)] | None = None
    """Dense bf16 TFLOP/s of one device, for MFU; None for what `pretrain.monitor.device_peak` knows of it."""
    sample_tokens: CountOrZero = 128
    """Length of the text sample printed at the end; 0 for none."""
    sample_prompt: str = ""
    """Text that the sample continues."""


@with_config(ConfigDict(extra="forbid"))  # pydantic hands it down to the sections
@dataclass(frozen=True)
class RunConfig:
    """All of a run. `out` is the run folder."""

    out: Text
    data: DataConfig
    train: TrainConfig
    model: DeepLoopConfig = field(default_factory=DeepLoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
