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
        if train.recompute != AUTO:
            if train.activation_gib is not None:
                raise ConfigError("train.activation_gib: means something with train.recompute auto only")
            Recompute.parse(train.recompute)
            return train.recompute, None
        if train.activation_gib is None:
            raise ConfigError("train.activation_gib: is required with train.recompute auto")
        rounds = most_rounds(train.rounds, config.model.num_rounds)
        if train.backprop_rounds is not None:
            rounds = min(rounds, train.backprop_rounds)
        if math.isinf(rounds):
            raise ConfigError("train.rounds: recompute auto needs to know the most rounds of a step; set high")
        precision = Precision()
        tokens = train.micro_batch_size * config.model.context_length
        choice = choose_recompute(config.model, tokens, train.activation_gib * 2**30, precision, int(rounds))
    except ModelConfigError as error:
        raise ConfigError(f"train.{error}") from None
    return choice.policy, choice.reason
