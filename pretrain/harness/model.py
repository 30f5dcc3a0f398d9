"""A checkpoint or an export as a model of lm-evaluation-harness.

A text follows the token that stands before documents in training, as in generation. Contexts too long for the model
lose their beginning.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from data_prep.manifest import load_manifest
from data_prep.tokenizer import load_tokenizer
from deeploop_model.generation import generate
from deeploop_model.sampling import Sampling
from pretrain.errors import ConfigError
from pretrain.generate import dataset_of
from pretrain.generation import cut_at, stop_rule
from pretrain.seeding import step_seed
from pretrain.weights import find_checkpoint, load_model

Scored = tuple[float, bool]
TokenRequest = tuple[Any, list[int], list[int]]  # (key of the answer's cache, context, continuation)
GENERATION_KEYS = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}
DTYPES = ("float32", "bfloat16")


@register_model("deeploop")
class DeepLoopLM(TemplateLM):
    """One process, one device.

    Args:
        checkpoint: a checkpoint, a run folder for its newest, or an export.
        rounds: rounds of every forward pass; those of training by default.
        data: dataset folder with the tokenizer, where it is not the one that the run found.
        batch_size: sequences per forward pass.
        device: cuda where there is one, by default.
        dtype: of the weights, float32 or bfloat16.
        max_gen_toks: tokens to generate where a task does not say.
        max_batch_size: of the harness's automatic batches, which there are none of here.

    Raises a user error of this project for what cannot be loaded or run.
    """

    def __init__(
        self,
        checkpoint: str,
        rounds: int | None = None,
        data: str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str = "float32",
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size: {batch_size} must be a number of 1 or more")
        if rounds is not None and not (isinstance(rounds, int) and rounds >= 1):
            raise ConfigError(f"rounds: {rounds} must be a number of 1 or more")
        folder = find_checkpoint(Path(checkpoint))
        dataset = dataset_of(folder, None if data is None else Path(data))
        separator_id = load_manifest(dataset).separator_id
        if separator_id is None:
            raise ConfigError(f"{dataset}: no token stands between its documents, so that a text cannot begin")
        self.tokenizer = load_tokenizer(dataset)
        self._separator_id = separator_id
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = load_model(folder).to(self._device, getattr(torch, dtype))
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise ConfigError(
                f"{dataset} has {self.tokenizer.vocab_size} tokens, the model reads {self.model.config.vocab_size}"
            )
        self.rounds = self.model.config.num_rounds if rounds is None else rounds
        self.batch_size = int(batch_size)
        self.max_gen_toks = max_gen_toks
        self._source = str(folder)

    @property
    def prefix_token_id(self) -> int:
        return self._separator_id

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_id

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation together that one pass reads."""
        return self.model.config.context_length

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.file.name

    def get_model_info(self) -> dict[str, Any]:
        """What the results file says of the model."""
        config = self.model.config
        return {
            "model_source": self._source,
            "rounds": self.rounds,
            "training_rounds": config.num_rounds,
            "alpha": config.rule.alpha,
            "model_num_parameters": sum(weight.numel() for weight in self.model.parameters()),
            "model_dtype": str(self.model.embedding.weight.dtype),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, after the separator unless `add_special_tokens` is False."""
        ids = self.tokenizer.encode(string)
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Scored]:
        """(sum of log-probabilities in nats, whether all are the most likely tokens) of continuations."""
        results: dict[int, Scored] = {}
        longest_first = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for batch in batches(tqdm(longest_first, disable=disable_tqdm, desc="loglikelihood"), self.batch_size):
            for index, scored in zip(batch, self._score([requests[i][1:] for i in batch]), strict=True):
                results[index] = scored
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], scored)
        return [results[index] for index in range(len(requests))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Scored]:
        # Padding stands behind the tokens, where no causal model looks.
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in pairs]
        width = max(map(len, rows)) - 1
        tokens_BT = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows], device=self._device)
        logits_BTV = self.model(tokens_BT, num_rounds=self.rounds).logits
        for logits_TV, row, (_, continuation) in zip(logits_BTV, rows, pairs, strict=True):
            count = min(len(continuation), len(row) - 1)
            targets_T = torch.tensor(row[len(row) - count :], device=self._device)
            yield score(logits_TV[len(row) - 1 - count : len(row) - 1], targets_T)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each token predicted once, in windows of the context length."""
        windows: list[TokenRequest] = []
        owners = []
        for index, request in enumerate(requests):
            tokens = self.tokenizer.encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += nats
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text, the end of the document or `max_gen_toks`."""
        results: dict[int, str] = {}
        alike = defaultdict(list)
        for index, request in enumerate(requests):
            alike[repr(request.args[1])].append(index)
        progress = tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until")
        for group in alike.values():
            for batch in batches(sorted(group, key=lambda i: -len(requests[i].args[0])), self.batch_size):
                texts = self._continue([requests[i].args[0] for i in batch], requests[batch[0]].args[1])
                for index, text in zip(batch, texts, strict=True):
                    results[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress.update(len(batch))
        progress.close()
        return [results[index] for index in range(len(requests))]

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        if unknown := options.keys() - GENERATION_KEYS:
            raise ConfigError(f"gen_kwargs: {min(unknown)}: is unknown here; use {', '.join(sorted(GENERATION_KEYS))}")
        room = self.max_length - options["max_gen_toks"]
        if room < 1:
            raise ConfigError(
                f"max_gen_toks: {options['max_gen_toks']} leaves no room for a prompt in the context of "
                f"{self.max_length} tokens; use less"
            )
        until = [text for text in options.get("until", []) if text]
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        generated = generate(
            self.model,
            self.model.config,
            [self.tok_encode(context)[-room:] for context in contexts],
            max_tokens=options["max_gen_toks"],
            sampling=Sampling(temperature, options.get("top_k"), options.get("top_p", 1.0)),
            seeds=[step_seed(0, 0, row) for row in range(len(contexts))],
            stop=stop_rule(self.tokenizer, until),
            num_rounds=self.rounds,
            device=self._device,
        )
        return [cut_at(self.tokenizer, continuation.tokens, until) for continuation in generated.continuations]


def score(logits_TV: Tensor, targets_T: Tensor) -> Scored:
    """Of the tokens that these logits predict."""
    log_p_TV = logits_TV.float().log_softmax(-1)
    nats = log_p_TV.gather(-1, targets_T.unsqueeze(-1)).sum()
    return float(nats), bool((log_p_TV.argmax(-1) == targets_T).all())


def batches(items: Iterable[int], size: int) -> Iterator[list[int]]:
    """The items in portions of up to `size`."""
    batch: list[int] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
