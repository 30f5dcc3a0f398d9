"""The recompute policy of a run: the one that is named, or the cheapest that fits the memory given for activations."""

from __future__ import annotations

import math

from deeploop_model import ModelConfigError
from deeploop_model.memory import Precision
from deeploop_model.recompute import Recompute
from deeploop_model.recompute_choice import AUTO, choose_recompute
from pretrain.config import RunConfig
from pretrain.errors import ConfigError
from pretrain.rounds import most_rounds


def chosen_recompute(config: RunConfig) -> tuple[str, str | None]:
    """The policy, and where it was chosen the reason, in a line. Raises ConfigError."""
    train = config.train
    try:
        if train.recompute == AUTO:
            return _cheapest(config)
        if train.activation_gib is not None:
            raise ConfigError("train.activation_gib: means something with train.recompute auto only")
        if Recompute.parse(train.recompute).kind == "selective" and train.compile:
            raise ConfigError("train.recompute: selective does not go with train.compile; use block")
    except ModelConfigError as error:
        raise ConfigError(f"train.{error}") from None
    return train.recompute, None


def _cheapest(config: RunConfig) -> tuple[str, str]:
    train = config.train
    if train.activation_gib is None:
        raise ConfigError("train.activation_gib: is required with train.recompute auto")
    unpredicted = {
        "train.round_loss": train.round_loss != "last",
        "train.backprop_rounds": train.backprop_rounds is not None,
        "data.separate_documents": config.data.separate_documents,
    }
    for key in (key for key, given in unpredicted.items() if given):
        raise ConfigError(f"{key}: its memory is not predicted by train.recompute auto; name a policy")
    rounds = most_rounds(train.rounds, config.model.num_rounds)
    if math.isinf(rounds):
        raise ConfigError("train.rounds: recompute auto needs to know the most rounds of a step; set high")
    choice = choose_recompute(
        config.model,
        train.micro_batch_size * config.model.context_length,
        train.activation_gib * 2**30,
        Precision(),
        int(rounds),
        without=["selective"] if train.compile else [],
    )
    return choice.policy, choice.reason
