"""README.md of an exported folder: what the model is, how it was trained, how to run it."""

from __future__ import annotations

from pretrain.export.source import Source

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- looped-transformer
- deeploop
---
"""
USAGE = """
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # rounds=8 changes the default
inputs = tokenizer(["a prompt", "another, longer prompt"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=50, rounds=8), skip_special_tokens=True))
```

`rounds` may be any number of 1 or more, in `from_pretrained`, in a call, in `generate`; alpha stays that of training.
"""
TOKENIZER = """
The tokenizer puts the separator of documents before a text, as in training; `add_special_tokens=False` leaves it out.
Text never becomes a special token.
"""


def model_card(source: Source, *, with_tokenizer: bool) -> str:
    """The whole file."""
    config, facts = source.model.config, source.facts
    parameters = sum(weight.numel() for weight in source.model.parameters())
    residual = source.fields["residual"]
    loss, val_loss = (f"{facts[name]:.4f} nats per token" if facts[name] else None for name in ("loss", "val_loss"))
    rows = {
        "stored blocks": f"K = {config.num_blocks}, prelude {config.num_prelude_blocks}, coda {config.num_coda_blocks}",
        "rounds in training": f"R = {config.num_rounds}; unrolled depth N = {config.unrolled_depth}",
        "residual rule": residual if isinstance(residual, str) else f"exponent {residual}",
        "alpha": f"{facts['alpha']:.6g}, of the training depth",
        "parameters": f"{parameters:,}",
        "context": f"{config.context_length} tokens",
        "vocabulary": f"{config.vocab_size} tokens",
        "optimizer steps": f"{facts['step']:,}",
        "training tokens": f"{facts['tokens']:,}",
        "last training loss": loss,
        "last validation loss": val_loss,
        "data fingerprint": f"`{facts['data_fingerprint']}`",
        "seed": facts["seed"],
        "trained on": f"{facts['ranks']} ranks, ZeRO stage {facts['zero_stage']}",
        "weights": str(source.model.embedding.weight.dtype).removeprefix("torch."),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value is not None)
    return (
        f"{HEADER}\n# {source.folder.parent.parent.name}, step {facts['step']}\n\n"
        "A looped language model: a stack of K stored blocks is applied R rounds, each visit\n"
        f"`x <- RMSNorm(alpha*x + f(x))` where the norm sits after.\n\n| | |\n|---|---|\n{table}"
        + USAGE
        + (TOKENIZER if with_tokenizer else "\nThe folder holds no tokenizer: give the model token ids.\n")
    )
