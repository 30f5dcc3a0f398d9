"""Run by path, in a process that cannot import this project: what `transformers` makes of exported folders.

python load_exported.py WORK FOLDER...: reads WORK/requests.json and WORK/tokens.pt, writes WORK/NAME.pt for each. Its
HF_HOME is where `transformers` puts its copy of a folder's code.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def load(folder: Path, requests: dict[str, Any], tokens_BT: torch.Tensor) -> dict[str, Any]:
    """All that the tests ask for."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    rounds = requests["rounds"]
    other = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, rounds=rounds[-1])
    with torch.no_grad():
        results = {
            "config": AutoConfig.from_pretrained(folder, trust_remote_code=True).to_dict(),
            "dtype": model.dtype,
            "logits": model(tokens_BT).logits,
            "logits_by_rounds": {r: model(tokens_BT, rounds=r).logits for r in rounds},
            "logits_loaded_with_rounds": other(tokens_BT).logits,
            "loss": model(tokens_BT, labels=tokens_BT).loss,
        }
    if (folder / "tokenizer_config.json").exists():
        results |= with_tokenizer(folder, model, requests)
    return results


def ids_and_texts(tokenizer: Any, texts: list[str]) -> dict[str, Any]:
    """What texts become, with and without the separator in front, and what they are read back as."""
    return {
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "ids_with_separator": [tokenizer.encode(text) for text in texts],
        "decoded": [tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) for text in texts],
        "decoded_with_separator": [tokenizer.decode(tokenizer.encode(text)) for text in texts],
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }


def with_tokenizer(folder: Path, model: Any, requests: dict[str, Any]) -> dict[str, Any]:
    """Ids of texts, and continuations of prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = requests["texts"]
    results = ids_and_texts(tokenizer, texts)
    inputs = tokenizer(requests["prompts"], return_tensors="pt", padding=True)
    results["inputs"] = dict(inputs)
    length, count = inputs["input_ids"].shape[1], requests["max_tokens"]
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    shapes: list[tuple[int, ...]] = []
    hook = model.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    results["generated"] = {r: model.generate(**inputs, **options, rounds=r)[:, length:] for r in requests["rounds"]}
    results["shapes"] = shapes
    hook.remove()
    for name, how in {"beams": {"num_beams": 3}, "greedy": {}}.items():
        for use_cache in (True, False):
            results[f"{name} {use_cache}"] = model.generate(**inputs, **options, **how, use_cache=use_cache)
    results["free"] = model.generate(**inputs, max_new_tokens=count, do_sample=False)[:, length:]
    saved = folder.parent / f"{folder.name}-saved-again"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    with torch.no_grad():
        results["logits_saved_again"] = again(inputs["input_ids"]).logits
        results["logits_before_saving"] = model(inputs["input_ids"]).logits
    results["ids_saved_again"] = [AutoTokenizer.from_pretrained(saved, trust_remote_code=True).encode(t) for t in texts]
    return results


def main(work: Path, folders: list[Path]) -> None:
    for package in ("deeploop_model", "pretrain", "data_prep"):
        assert importlib.util.find_spec(package) is None, f"{package} can be imported"
    requests, tokens_BT = json.loads((work / "requests.json").read_text()), torch.load(work / "tokens.pt")
    for folder in folders:
        if (folder / "config.json").exists():
            results = load(folder, requests, tokens_BT)
        else:
            results = ids_and_texts(AutoTokenizer.from_pretrained(folder, trust_remote_code=True), requests["texts"])
        torch.save(results, work / f"{folder.name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
