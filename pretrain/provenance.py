"""What a run was made with, written beside its results."""

from __future__ import annotations

import errno
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from data_prep.durable import write_atomic
from pretrain.config import RunConfig
from pretrain.config_file import as_tree
from pretrain.errors import PretrainError, SaveError

PACKAGES = ("torch", "deepspeed", "numpy", "sentencepiece")


def write_resolved_config(out: Path, config: RunConfig, ds_config: dict[str, Any]) -> None:
    """`config.yaml` of the run folder: every value in force, versions and git revision.

    The file itself can be given to --config again. Raises PretrainError where the folder cannot be written.
    """
    header = [f"# python {platform.python_version()}", *(f"# {name} {version(name)}" for name in PACKAGES)]
    header.append(f"# git {git_revision()}")
    body = yaml.safe_dump(as_tree(config), sort_keys=False)
    ds_body = "".join(f"# {line}\n" for line in yaml.safe_dump(ds_config, sort_keys=False).splitlines())
    try:
        for folder in (out, out / "checkpoints", out / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(header) + f"\n\n{body}\n# DeepSpeed configuration:\n{ds_body}"
        write_atomic(out / "config.yaml", text.encode())
    except OSError as error:
        kind = SaveError if error.errno in (errno.ENOSPC, errno.EDQUOT) else PretrainError  # space may come back
        raise kind(f"out: {out}: cannot be written: {error.strerror}") from None


def git_revision() -> str:
    """Commit of this source tree, `-dirty` behind it where files differ; `unknown` outside a repository."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()
