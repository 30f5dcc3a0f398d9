"""A folder that `transformers` loads on a machine where this project is not installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from data_prep.durable import publish_folder
from pretrain.export.code import source_files
from pretrain.export.model_card import model_card
from pretrain.export.source import Source
from pretrain.export.tokenizer_files import REMOTE, TokenizerFiles, as_json
from pretrain.exported import HF_CONFIG, HF_PREFIX, HF_TRAINING, HF_WEIGHTS


def write_hf_folder(source: Source, tokenizer: TokenizerFiles | None, out: Path, rounds: int | None = None) -> None:
    """Writes the folder `out`, which must not exist, whole or not at all.

    Args:
        tokenizer: files of the tokenizer, if it is known.
        rounds: what the exported model runs unless told otherwise; the rounds of training by default.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        for name, content in folder_files(source, tokenizer, rounds).items():
            (temporary / name).write_bytes(content)
        weights = {HF_PREFIX + name: weight.contiguous() for name, weight in source.model.state_dict().items()}
        save_file(weights, temporary / HF_WEIGHTS, metadata={"format": "pt"})
        publish_folder(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def folder_files(source: Source, tokenizer: TokenizerFiles | None, rounds: int | None) -> dict[str, bytes]:
    """Everything but the weights."""
    special = (
        {}
        if tokenizer is None
        else {
            "bos_token_id": tokenizer.separator_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.eos_id,
        }
    )
    config: dict[str, Any] = {
        "model_type": "deeploop",
        "architectures": ["DeepLoopForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deeploop.DeepLoopHFConfig",
            "AutoModelForCausalLM": "modeling_deeploop.DeepLoopForCausalLM",
        },
        "dtype": str(source.model.embedding.weight.dtype).removeprefix("torch."),
        "rounds": source.model.config.num_rounds if rounds is None else rounds,
        **source.fields,
        **special,
        HF_TRAINING: source.facts,
    }
    code = source_files(f"{REMOTE}.configuration_deeploop", f"{REMOTE}.modeling_deeploop")
    return {
        HF_CONFIG: as_json(config),
        "generation_config.json": as_json({"_from_model_config": True, **special}),
        "README.md": model_card(source, with_tokenizer=tokenizer is not None).encode(),
        **{name: text.encode() for name, text in code.items()},
        **({} if tokenizer is None else tokenizer.files),
    }
