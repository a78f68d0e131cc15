"""Tiny models with random weights: a config whose sizes shrink and whose structure stays."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..hf.parts.tokens import numbers_tokens

VOCABULARY = 67
LAYERS = 4
WINDOW = 7
POSITIONS = 128
EXTENDED = 20  # positions of the pretraining that scaled rotary positions extend: fewer than a batch has
# config attributes that mean the same in every family
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "dff", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    "max_target_positions": POSITIONS,
    "type_vocab_size": 2,
    "max_window_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# attributes of some families
_MORE_SIZES: dict[str, Any] = {
    **dict.fromkeys(("d_inner", "dim_ff", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("dim_head", "global_head_dim", "swa_head_dim", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "num_attention_heads_per_layer"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "kv_n_heads", "moe_top_k", "zero_expert_num"), 2),
    **dict.fromkeys(("mask_token_id", "sep_token_id", "cls_token_id"), VOCABULARY - 1),
    **dict.fromkeys(("num_kv_shared_layers", "num_layers_per_stack"), 2),
    "original_max_position_embeddings": EXTENDED,
    "vocab_size_per_layer_input": VOCABULARY,
    "word_embed_proj_dim": 32,
    "prediction_head_size": 32,
    "hidden_size_per_layer_input": 6,
    "floor_scale": 8,
    "local_attention": 2 * WINDOW,
    "window_size": WINDOW,
    "rotary_dim": 4,
    "laurel_rank": 8,
}
_FEWER = {"num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "type_vocab_size"}  # kept if fewer
_OF_THE_BATCH = re.compile(r"vocab_size|token_id$|^max_position|^n_positions$|^n_ctx$|^max_(seq_len|target_positions)$")
_NO_PART_OF_IT = {"quantization_config", "id2label", "label2id", "auto_map"}
_EVERY = re.compile(r"_(step|interval|freq|frequency|period|pattern)$|every_n_")
_LAYER_COUNTS = tuple(key for key, size in SIZES.items() if size == LAYERS and "layer" in key)
_POSITION_COUNTS = tuple(key for key, size in SIZES.items() if size == POSITIONS)
_HEAD_COUNTS = tuple(key for key, size in SIZES.items() if size == 4 and "head" in key)


def tiny_copy(
    model_class: Callable[..., PreTrainedModel], config: PreTrainedConfig, batch_length: int | None = None
) -> PreTrainedModel:
    """A tiny model of the structure of a config; with its vocabulary, and with positions enough, for a real batch.

    Args:
        model_class (`type`): The class.
        config (`PreTrainedConfig`): Of the model as it is.
        batch_length (`int`, *optional*): Tokens of a sequence of the user's; by default the vocabulary shrinks, too.
    """
    small = shrink(config, keep_vocabulary=batch_length is not None)
    text = small.get_text_config()
    if batch_length is not None:
        for name in _POSITION_COUNTS:
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, min(max(POSITIONS, batch_length + 2), getattr(text, name)))
    return tiny_model(model_class, small)


def shrink(config: PreTrainedConfig, keep_vocabulary: bool = False) -> PreTrainedConfig:
    """A config of the same structure (kinds of layers and of attention, rotary positions, experts, windows, caps, tied
    weights) with small sizes and no dropout.

    Args:
        config (`PreTrainedConfig`): Of the model as it is; not changed.
        keep_vocabulary (`bool`, defaults to `False`): Whether token ids and positions of a real batch must fit.
    """
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_PART_OF_IT}
    small = _shrunk(values, keep_vocabulary)
    return type(config).from_dict(small)


def tiny_model(model_class: Callable[..., PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, random weights, in the default dtype and in training mode; the same in every process."""
    prepare(config)
    torch.manual_seed(0)
    model = model_class(config)
    model.to(dtype=torch.get_default_dtype())  # type: ignore[call-arg]
    randomize(model)
    return model.train()


def prepare(config: PreTrainedConfig) -> None:
    """Chooses implementations by which one process computes the whole model, in any dtype."""
    config._experts_implementation = "eager"  # the fused ones know no fp64
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # some versions choose sdpa, which forgets it


def randomize(model: PreTrainedModel) -> None:
    """Weights under which attention, norms, sinks and routers all matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * min(parameter.shape[-2:]) ** -0.5)


def first_position(model: PreTrainedModel) -> int:
    """The position of a first token: RoBERTa and its kin count from `padding_idx + 1`."""
    numbered = any(numbers_tokens(module) for module in model.modules())
    return model.config.pad_token_id + 1 if numbered else 0


def note(model: PreTrainedModel) -> str:
    """What a reader of a verdict should know of a model: its layers, and what is unlike in others."""
    kinds = Counter(kind.removesuffix("_attention") for kind in getattr(model.config, "layer_types", None) or ())
    facts = [f"layers: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"] if len(kinds) > 1 else []
    if first_position(model):
        facts.append("positions count from padding_idx + 1")
    if not model.training:
        facts.append("compared in evaluation mode: in training its router draws experts at random")
    return "; ".join(facts)


def _shrunk(values: dict[str, Any], keep_vocabulary: bool) -> dict[str, Any]:
    """The attributes of a config, or of a part of it, with small sizes."""
    count = next((values[key] for key in _LAYER_COUNTS if isinstance(values.get(key), int)), 0)
    layers = _layers(values, count)
    small = {}
    for key, value in values.items():
        if key == "per_layer_config" and value:
            owns = {int(layer): _shrunk(own, keep_vocabulary) for layer, own in value.items()}
            value = {place: owns[layer] for place, layer in enumerate(layers) if layer in owns}
        elif isinstance(value, dict):
            value = _shrunk(value, keep_vocabulary)
        elif isinstance(value, list) and len(value) == count > LAYERS:
            value = [_size(key, value[layer]) for layer in layers]
        elif not (keep_vocabulary and _OF_THE_BATCH.search(key)):
            value = _size(key, value)
        small[key] = value
    for key in set(_LAYER_COUNTS) & set(values):
        small[key] = len(layers) if values[key] == count else small[key]
    if "max_window_layers" in values and values["max_window_layers"] >= count:
        small["max_window_layers"] = len(layers)
    _shrink_heads(values, small)
    _shrink_positions(values, small)
    return small


def _layers(values: dict[str, Any], count: int) -> list[int]:
    """Layers that stand for all: one of each kind, again and again."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count > LAYERS]
    telling = [value for value in lists if len({repr(entry) for entry in value}) <= LAYERS]
    kinds: dict[str, list[int]] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in telling]), []).append(layer)
    if count <= LAYERS:
        return list(range(count))
    depth = max(map(len, kinds.values()))
    in_turn = [members[turn] for turn in range(depth) for members in kinds.values() if turn < len(members)]
    return in_turn[: max(LAYERS, len(kinds))]


def _size(key: str, value: Any) -> Any:
    """A small size in the place of one that is set; other values stay."""
    if isinstance(value, list) and key.endswith("token_id") and value:  # several ends of a sequence
        return SIZES.get(key, VOCABULARY - 1)
    if isinstance(value, float) and ("drop" in key or "jitter" in key):
        return 0.0
    if isinstance(value, float) and key in ("partial_rotary_factor", "rotary_pct"):
        return max(2, round(4 * value)) / 4  # of heads of 8
    if isinstance(value, bool) or not isinstance(value, int) or (value <= 0 and not key.endswith("token_id")):
        return value
    if _EVERY.search(key):
        return min(value, 2)
    size = SIZES.get(key, _MORE_SIZES.get(key))
    if size is None:
        return value
    if key in ("n_group", "first_k_dense_replace", "num_dense_layers"):
        return min(value, 2 if key == "n_group" else 1)
    return min(value, size) if key in _FEWER else size


def _shrink_heads(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Heads of keys stay as many as those of queries, or one, or fewer; heads of MLA keep their parts."""
    heads = next((values[key] for key in _HEAD_COUNTS if isinstance(values.get(key), int)), 0)
    for key in {"num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"} & set(values):
        if isinstance(values[key], int) and values[key] > 0:
            small[key] = 4 if values[key] == heads else min(values[key], 2)
    for part in ("qk_rope_head_dim", "qk_head_dim"):
        if values.get("head_dim") and values["head_dim"] == values.get(part):
            small["head_dim"] = small[part]


def _shrink_positions(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Scaled rotary positions stay in effect: a batch is longer than what they extend."""
    ropes = [value for value in small.values() if isinstance(value, dict)]
    if any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        small["max_position_embeddings"] = EXTENDED
    width = small.get("qk_rope_head_dim") or small.get("head_dim") or 8
    for rope in ropes:
        share = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
        pairs = int(width * share) // 2
        for key in {"short_factor", "long_factor"} & set(rope):
            rope[key] = [rope[key][index * len(rope[key]) // pairs] for index in range(pairs)]
