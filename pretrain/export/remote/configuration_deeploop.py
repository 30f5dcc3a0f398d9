"""The config of an exported model: the fields of `DeepLoopConfig`, and the number of rounds to run."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from deeploop_model.config import DeepLoopConfig
from deeploop_model.residual import ExponentRule

FIELDS = tuple(field.name for field in dataclasses.fields(DeepLoopConfig))


class DeepLoopHFConfig(PretrainedConfig):
    """Args:
        rounds: rounds of a forward pass; those of training (`num_rounds`, which set alpha) by default.
        kwargs: fields of `DeepLoopConfig`, and those that every config of the library takes.

    Raises ModelConfigError, a ValueError, for a model that cannot be built.
    """

    model_type = "deeploop"
    attribute_map = {  # noqa: RUF012  the library's name for it, and not typed there
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_blocks",
        "max_position_embeddings": "context_length",
        "intermediate_size": "d_ff",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, rounds: int | None = None, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        network = network_config(own)
        for name in FIELDS:
            setattr(self, name, own.get(name, getattr(network, name)))
        self.rounds = network.num_rounds if rounds is None else rounds
        super().__init__(**kwargs)

    def network(self) -> DeepLoopConfig:
        """The network's own config, with what was changed since."""
        return network_config({name: getattr(self, name) for name in FIELDS})


def network_config(fields: dict[str, Any]) -> DeepLoopConfig:
    """From JSON values, where an exponent rule is an object {p, c, d}."""
    residual = fields.get("residual")
    return DeepLoopConfig(**(fields | {"residual": ExponentRule(**residual)} if isinstance(residual, dict) else fields))
