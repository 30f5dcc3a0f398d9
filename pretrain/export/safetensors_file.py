"""One file with the weights under their own names; its metadata hold the model's config and the training facts."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save_file

from data_prep.durable import fsync_folder
from pretrain.export.source import Source
from pretrain.exported import METADATA_KEY


def write_safetensors_file(source: Source, out: Path) -> None:
    """Writes `out`, whole or not at all."""
    own = {"model": source.fields, "training": source.facts}
    weights = {name: weight.contiguous() for name, weight in source.model.state_dict().items()}
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        save_file(weights, temporary, metadata={"format": "pt", METADATA_KEY: json.dumps(own)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(out.absolute().parent)
