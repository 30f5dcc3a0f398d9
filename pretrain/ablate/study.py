"""What a study file says: one base run, and grids of settings in which it is varied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen
from pydantic import ConfigDict, with_config

from pretrain.config import Text

Control = Literal["equal_parameters", "equal_flops_more_tokens", "equal_flops_unshared"]
Values = Annotated[tuple[Any, ...], MinLen(1)]

AXIS_KEYS = {
    "residual": "model.residual",
    "p": "model.residual",
    "num_rounds": "model.num_rounds",
    "seed": "train.seed",
}
"""Short names of axes, and the run's keys that they set. `p: [0.3]` is one more residual rule, {p: 0.3}."""


@dataclass(frozen=True)
class Grid:
    """Every combination of its axes' values is a run."""

    axes: Annotated[dict[str, Values], MinLen(1)]
    """Values by axis: a name of AXIS_KEYS or a dotted key of the run's YAML."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key, over those of the study."""
    controls: tuple[Control, ...] = ()
    """Unlooped models to train beside each looped setting, see `pretrain.ablate.plan`."""


@dataclass(frozen=True)
class Divergence:
    """When a run that came to its last step counts as diverged all the same."""

    margin: Annotated[float, Ge(0)] = 0.1
    """Its validation loss is not this many nats below that of a unigram model, see `pretrain.ablate.unigram`."""
    val_loss: float | None = None
    """Or not below this, in nats per token, instead."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Study:
    """All of a study. Paths are relative to the working directory, as those of a run are."""

    out: Text
    """The study's folder: OUT/GRID/RUN are run folders, the results lie in OUT itself."""
    base: Text
    """The YAML file of the run that is varied."""
    ds_config: Text
    """DeepSpeed's configuration, of all runs."""
    grids: Annotated[dict[Text, Grid], MinLen(1)]
    launcher: str = ""
    """What goes before `pretrain/run.py`, such as `deepspeed --num_gpus 2`; $NAMES of the environment are filled in.
    Empty: one process."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key, over those of the base run."""
    divergence: Divergence = field(default_factory=Divergence)
