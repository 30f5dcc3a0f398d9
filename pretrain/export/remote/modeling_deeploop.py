"""A DeepLoop model as the `transformers` library calls it.

Rows may be padded on the left or on the right; the real tokens of a row must stand together. The network itself knows
no padding on the left: rows are pushed to the left before it and logits moved back behind it, so that a row's logits
are those of the row alone.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from deeploop_model.kv_cache import KVCache
from deeploop_model.loss_head import IGNORED_TARGET
from deeploop_model.model import DeepLoopModel
from pretrain.export.remote.configuration_deeploop import DeepLoopHFConfig

# The library renamed it from past_key_values; both are understood here.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
)
FIRST_CAPACITY = 128  # tokens; doubled when full


class DeepLoopCache:
    """Keys and values per visit, and the number of columns, padding among them, that the library has passed in."""

    is_compileable = False
    is_linear = (False,)

    def __init__(self, config: DeepLoopHFConfig, batch_size: int, rounds: int | None) -> None:
        network = config.network()
        capacity = min(FIRST_CAPACITY, network.context_length)
        self.visits = KVCache(network, batch_size, capacity, config.rounds if rounds is None else rounds)
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns passed in so far."""
        return self.columns

    def append(self, new_tokens: list[int], columns: int) -> None:
        """Makes room for the next tokens of each row."""
        needed = max(old + new for old, new in zip(self.visits.lengths, new_tokens, strict=True))
        if needed > self.visits.capacity:
            self.visits.reserve(max(needed, min(2 * self.visits.capacity, self.visits.context_length)))
        self.columns += columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b takes over what row `beam_idx[b]` holds."""
        self.visits.select(beam_idx)


class DeepLoopForCausalLM(PreTrainedModel, GenerationMixin):
    """Next-token prediction at `rounds` rounds, the config's by default."""

    config_class = DeepLoopHFConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012  the library's name for it, and not typed there

    def __init__(self, config: DeepLoopHFConfig) -> None:
        super().__init__(config)
        self.model = DeepLoopModel(config.network())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the network draws its own weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a slot per layer is too few

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: DeepLoopCache | None = None,
        past_key_values: DeepLoopCache | None = None,
        use_cache: bool | None = None,
        rounds: int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, vocab_size]; those of padding mean nothing.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], or with a cache [B, columns so far + T]; 0 for padding.
            labels: int64 [B, T], the tokens themselves; -100 is left out of the mean.
            cache, past_key_values: what an earlier call with `use_cache` returned.
            use_cache: whether keys and values are kept and returned; a cache fixes the number of rounds.
            rounds: rounds to run instead of the config's.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DeepLoopCache(self.config, len(input_ids), rounds)
        padding = None if attention_mask is None else Padding.of(attention_mask[:, -input_ids.shape[1] :])
        tokens_BT = input_ids if padding is None else padding.to_the_left(input_ids)
        if cache is None:
            rounds = self.config.rounds if rounds is None else rounds
            logits_BTV = self.model(tokens_BT, num_rounds=rounds).logits
        else:
            new_tokens = [input_ids.shape[1]] * len(input_ids) if padding is None else padding.lengths
            cache.append(new_tokens, columns=input_ids.shape[1])
            logits_BTV = self.model(tokens_BT, cache=cache.visits, new_tokens=new_tokens).logits
        if padding is not None:
            logits_BTV = padding.back(logits_BTV)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED_TARGET
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **{CACHE: cache})
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: DeepLoopCache | None = None,
        past_key_values: DeepLoopCache | None = None,
        use_cache: bool | None = None,
        rounds: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What one step of generation hands to `forward`: the columns that the cache does not hold."""
        cache = past_key_values if cache is None else cache
        if cache is not None and (attention_mask is None or attention_mask.shape == input_ids.shape):
            input_ids = input_ids[:, cache.columns :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "cache": cache,
            "use_cache": use_cache,
            "rounds": rounds,
        }


@dataclasses.dataclass(frozen=True)
class Padding:
    """Where the real tokens of each row stand."""

    first_B1: Tensor
    lengths: list[int]

    @staticmethod
    def of(mask_BT: Tensor) -> Padding | None:
        """None without padding. Raises ValueError for rows whose real tokens do not stand together."""
        real_BT = mask_BT.bool()
        if bool(real_BT.all()):
            return None
        first_B1 = real_BT.int().argmax(dim=1, keepdim=True)
        lengths_B1 = real_BT.sum(dim=1, keepdim=True)
        columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        if not torch.equal(real_BT, (columns_T >= first_B1) & (columns_T < first_B1 + lengths_B1)):
            raise ValueError("attention_mask: the ones of a row must stand together, with zeros before or behind them")
        return Padding(first_B1, lengths_B1.flatten().tolist())

    def to_the_left(self, tokens_BT: Tensor) -> Tensor:
        """Every row's real tokens from column 0 on."""
        columns_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return tokens_BT.gather(1, (columns_T + self.first_B1).clamp(max=tokens_BT.shape[1] - 1))

    def back(self, logits_BTV: Tensor) -> Tensor:
        """Logits in the columns that the tokens came from."""
        columns_T = torch.arange(logits_BTV.shape[1], device=logits_BTV.device)
        index_BT = (columns_T - self.first_B1).clamp(min=0)
        return logits_BTV.gather(1, index_BT.unsqueeze(-1).expand_as(logits_BTV))
