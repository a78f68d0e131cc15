"""Tiny models with random weights: a config whose sizes shrink and whose structure stays."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..hf.parts.tokens import numbers_tokens
from ..hf.verdicts import LAYER_COUNTS, LAYER_LISTS, STEPS

VOCABULARY = 67
LAYERS = 4
WINDOW = 7
_POSITIONS = 128
_EXTENDED = 20  # positions of the pretraining that scaled rotary positions extend: fewer than a batch has
_POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads")
# config attributes that mean the same in every family, and their sizes
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "dff", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys((*LAYER_COUNTS, *_HEAD_COUNTS, "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 12),
    **dict.fromkeys(_POSITION_COUNTS, _POSITIONS),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "type_vocab_size"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "max_window_layers", "eos_token_id"), 2),
    "vocab_size": VOCABULARY,
    "v_head_dim": 6,
    "pad_token_id": 0,
}
# attributes of some families
_MORE_SIZES: dict[str, int] = {
    **dict.fromkeys(("d_inner", "dim_ff", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("dim_head", "global_head_dim", "swa_head_dim", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "num_attention_heads_per_layer", "rotary_dim"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "kv_n_heads", "moe_top_k", "zero_expert_num"), 2),
    **dict.fromkeys(("mask_token_id", "sep_token_id", "cls_token_id"), VOCABULARY - 1),
    **dict.fromkeys(("num_kv_shared_layers", "num_layers_per_stack", "n_group"), 2),
    **dict.fromkeys(("word_embed_proj_dim", "prediction_head_size"), 32),
    **dict.fromkeys(("floor_scale", "laurel_rank"), 8),
    "original_max_position_embeddings": _EXTENDED,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 6,
    "local_attention": 2 * WINDOW,
}
_AT_MOST = {"num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "type_vocab_size", "n_group"}
_WINDOW = re.compile(r"window(?!.*layers)|att\w*_chunk")  # by whatever name
_NO_PART_OF_IT = {"quantization_config", "id2label", "label2id", "auto_map"}


def tiny_copy(
    model_class: Callable[..., PreTrainedModel], config: PreTrainedConfig, batch_length: int | None = None
) -> PreTrainedModel:
    """The [`tiny_model`] of a config that is made small by [`shrink`]."""
    return tiny_model(model_class, shrink(config, batch_length))


def shrink(config: PreTrainedConfig, batch_length: int | None = None) -> PreTrainedConfig:
    """A config of the same structure (kinds of layers and of attention, rotary positions, experts, windows, caps, tied
    weights) with small sizes and no dropout.

    Args:
        config (`PreTrainedConfig`): Of the model as it is; not changed.
        batch_length (`int`, *optional*): Tokens of a real batch, whose ids and positions must fit.
    """
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_PART_OF_IT}
    return type(config).from_dict(_shrunk(values, batch_length))


def tiny_model(model_class: Callable[..., PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, random weights, in the default dtype and in training mode; the same in every process."""
    prepare(config)
    torch.manual_seed(0)
    model = model_class(config)
    model.to(dtype=torch.get_default_dtype())  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # weights under which attention, norms, sinks and routers all matter
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * min(parameter.shape[-2:]) ** -0.5)
    return model.train()


def prepare(config: PreTrainedConfig) -> None:
    """Chooses implementations by which one process computes the whole model, in any dtype."""
    config._experts_implementation = "eager"  # the fused ones know no fp64
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # some versions choose sdpa, which forgets it


def first_position(model: PreTrainedModel) -> int:
    """The position of a first token: RoBERTa and its kin count from `padding_idx + 1`."""
    numbered = any(numbers_tokens(module) for module in model.modules())
    return model.config.pad_token_id + 1 if numbered else 0


def note(model: PreTrainedModel) -> str:
    """What a reader of a verdict should know of a model: its layers, and what is unlike in others."""
    kinds = Counter(kind.removesuffix("_attention") for kind in getattr(model.config, "layer_types", None) or ())
    facts = [f"layers: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"] if len(kinds) > 1 else []
    return "; ".join([*facts, *(["positions count from padding_idx + 1"] if first_position(model) else [])])


def _shrunk(values: dict[str, Any], batch_length: int | None) -> dict[str, Any]:
    """The attributes of a config, or of a part of it, with small sizes."""
    count = next((values[key] for key in LAYER_COUNTS if isinstance(values.get(key), int)), 0)
    layers = _layers(values, count)
    small: dict[str, Any] = {}
    for key, value in values.items():
        if key == "per_layer_config" and value:
            owns = {int(layer): _shrunk(own, batch_length) for layer, own in value.items()}
            small[key] = {place: _twice(owns[layer]) for place, layer in enumerate(layers) if layer in owns}
        elif isinstance(value, dict):
            small[key] = _shrunk(value, batch_length)
        elif isinstance(value, list) and len(value) == count:
            small[key] = [_size(key, value[layer]) for layer in layers]
        elif _lists_layers(key, value, count):
            small[key] = [place for place, layer in enumerate(layers) if layer in value]
        elif batch_length is not None and key in _POSITION_COUNTS and isinstance(value, int):
            small[key] = min(max(_POSITIONS, batch_length + 2), value)
        elif batch_length is not None and ("vocab_size" in key or key.endswith("token_id")):
            small[key] = value
        else:
            small[key] = len(layers) if key in LAYER_COUNTS and value == count else _size(key, value)
    if "max_window_layers" in values:
        all_whole = values["max_window_layers"] >= count
        small["max_window_layers"] = len(layers) if all_whole else min(values["max_window_layers"], len(layers) // 2)
    _shrink_heads(values, small)
    _shrink_positions(small)
    return small


def _layers(values: dict[str, Any], count: int) -> list[int]:
    """Layers that stand for all: one of each kind, again and again."""
    if count <= LAYERS:
        return list(range(count))
    kinds: dict[str, list[int]] = {}
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    telling = [value for value in lists if isinstance(value[0], str) or len({repr(entry) for entry in value}) <= LAYERS]
    indices = [value for key, value in values.items() if _lists_layers(key, value, count)]
    for layer in range(count):
        kind = [value[layer] for value in telling], [layer in value for value in indices]
        kinds.setdefault(repr(kind), []).append(layer)
    depth = max(map(len, kinds.values()))
    in_turn = [members[turn] for turn in range(depth) for members in kinds.values() if turn < len(members)]
    return in_turn[: max(LAYERS, len(kinds))]


def _lists_layers(key: str, value: Any, count: int) -> bool:
    """Whether an attribute lists layers by their indices."""
    if not isinstance(value, list) or not LAYER_LISTS.search(key) or len(value) == count:
        return False
    return all(type(layer) is int and 0 <= layer < count for layer in value)


def _twice(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a layer has apart from the others: unlike theirs."""
    return {key: 2 * size if type(size) is int else size for key, size in sizes.items()}


def _size(key: str, value: Any) -> Any:
    """A small size in the place of one that is set; other values stay."""
    if isinstance(value, list) and key.endswith("token_id") and value:  # several ends of a sequence
        return SIZES.get(key, VOCABULARY - 1)
    if isinstance(value, float) and ("drop" in key or "jitter" in key):
        return 0.0
    if isinstance(value, float) and key in ("partial_rotary_factor", "rotary_pct"):
        return max(2, round(4 * value)) / 4  # of heads of 8
    if type(value) is not int or (value <= 0 and not key.endswith("token_id")):
        return value
    if key.endswith("_offset"):
        return min(value, 1)
    if STEPS.search(key) and "heads" not in key:
        return min(value, 2)
    size = {**SIZES, **_MORE_SIZES}.get(key, WINDOW if _WINDOW.search(key) else value)
    return min(value, size) if key in _AT_MOST else size


def _shrink_heads(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Heads of keys stay as many as those of queries, or one, or fewer; heads of MLA keep their parts."""
    heads = next((values[key] for key in _HEAD_COUNTS if isinstance(values.get(key), int)), 0)
    for key in {"num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"} & set(values):
        if isinstance(values[key], int) and values[key] > 0:
            small[key] = 4 if values[key] == heads else min(values[key], 2)
    for part in ("qk_rope_head_dim", "qk_head_dim"):
        if values.get("head_dim") and values["head_dim"] == values.get(part):
            small["head_dim"] = small[part]


def _shrink_positions(small: dict[str, Any]) -> None:
    """Scaled rotary positions, of the model or of a layer type, stay in effect: a batch is longer than they extend."""
    parts = [value for key, value in small.items() if "rope" in key and isinstance(value, dict)]
    ropes = [*parts, *(rope for part in parts for rope in part.values() if isinstance(rope, dict))]
    if any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        small.update(dict.fromkeys(set(_POSITION_COUNTS) & set(small), _EXTENDED))
    width = small.get("qk_rope_head_dim") or small.get("head_dim") or 8
    for rope in ropes:
        share = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
        pairs = int(width * share) // 2
        for key in {"short_factor", "long_factor"} & set(rope):
            rope[key] = [rope[key][index * len(rope[key]) // pairs] for index in range(pairs)]
