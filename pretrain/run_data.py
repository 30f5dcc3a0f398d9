"""The datasets of a run, opened together: what is trained on, what is validated on, and what they agree in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep.manifest import Manifest
from data_prep.mixture import Mixture, Source
from data_prep.reader import TokenSplit, open_split
from pretrain.config import RunConfig
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class RunData:
    """One or several datasets with their shares of the samples."""

    training: Mixture
    validation: dict[str, TokenSplit]
    """By the name of the source; empty for a run without validation."""
    weights: dict[str, float]
    """Shares of the sources, which add up to 1."""

    @property
    def manifests(self) -> list[Manifest]:
        return [split.manifest for split in self.training.splits]

    @property
    def tokenizer_folder(self) -> Path:
        """A dataset folder with the tokenizer that made all of them."""
        return self.training.splits[0].folder

    @property
    def tokenizer_sha256(self) -> str | None:
        return self.manifests[0].tokenizer.sha256

    @property
    def separator_id(self) -> int | None:
        """The token before every document, see `Manifest.separator_id`."""
        return self.manifests[0].separator_id

    def epochs(self, samples: int) -> dict[str, float]:
        """Epochs of each source that `samples` samples amount to: `epoch`, or `epoch/SOURCE` for several."""
        epochs = self.training.epochs(samples)
        names = [f"epoch/{name}" for name in self.weights] if len(epochs) > 1 else ["epoch"]
        return dict(zip(names, epochs, strict=True))


def open_data(config: RunConfig) -> RunData:
    """Opens every dataset of the run and checks that they fit one another.

    Raises ConfigError for the configuration's part in it, DataError for the datasets'.
    """
    sources = config.data.sources
    training = Mixture(
        [Source(Path(source.path), source.weight) for source in sources],
        "train",
        config.model.context_length,
        config.train.seed,
    )
    names = source_names([source.path for source in sources])
    total = sum(source.weight for source in sources)
    data = RunData(
        training,
        {name: open_split(Path(source.path), "validation") for name, source in zip(names, sources, strict=True)}
        if config.train.validate_every
        else {},
        {name: source.weight / total for name, source in zip(names, sources, strict=True)},
    )
    separators = {manifest.separator_id for manifest in data.manifests}
    if config.data.separate_documents and (None in separators or len(separators) > 1):
        found = "no token between documents" if None in separators else "documents that begin with different tokens"
        raise ConfigError(f"data.separate_documents: true, but the data has {found}; use false")
    return data


def source_names(paths: list[str]) -> list[str]:
    """The folders' own names, as far as they tell the sources apart."""
    names = [Path(path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [f"{index}-{name}" for index, name in enumerate(names)]
