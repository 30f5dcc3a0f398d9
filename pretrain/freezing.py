"""Training chosen parts of a model: which weights learn, by patterns over their names.

Patterns are those of the shell (`*`, `?`, `[ab]`) and must fit a whole name, as in `blocks.*` or
`*.attention.qkv.weight`. A frozen weight has no gradient, no fp32 master and no optimizer state, and no weight decay
reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from deeploop_model import DeepLoopModel
from pretrain.errors import ConfigError


def freeze(model: DeepLoopModel, trainable: Sequence[str], frozen: Sequence[str]) -> list[str]:
    """Leaves those weights trainable that a pattern of `trainable` names and none of `frozen` does.

    Returns the names of the frozen ones. Raises ConfigError for a pattern without a weight, and where nothing is left.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("trainable", trainable), ("frozen", frozen)):
        for pattern in patterns:
            if not _matching(names, [pattern]):
                raise ConfigError(f"train.{key}: {pattern!r} names no weight of this model; {_families(names)}")
    learning = _matching(names, trainable) - _matching(names, frozen)
    if not learning:
        raise ConfigError(f"train.frozen: {list(frozen)} leaves nothing of train.trainable {list(trainable)} to train")
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in learning)
    return [name for name in names if name not in learning]


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}


def _families(names: Sequence[str]) -> str:
    return "its weights are " + ", ".join(dict.fromkeys(f"{name.split('.')[0]}.*" for name in names))
