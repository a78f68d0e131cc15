"""Tiny models with random weights: the sizes of a config shrink, but its structure stays."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ..hf.models.layer_sizes import CHOSEN, EXPERTS
from ..hf.parts.tokens import numbers_tokens

LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "decoder_layers",
    "num_decoder_layers",
    "layers",
    "depth",
    "encoder_layers",
)
LAYER_LISTS = re.compile(r"layer|_ids$|idx|indices|indexes")  # lists of layers, by their indices
STEPS = re.compile(r"_(step|interval|freq|frequency|period|pattern)$|every_n_|(kv|key_value)_heads$|per_tok$")
VOCABULARY, LAYERS, WINDOW, POSITIONS = 67, 4, 7, 128
EXTENDED = 20  # pretraining length that scaled RoPE extends: shorter than a batch
POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
HEAD_COUNTS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
_AT_MOST = {
    *CHOSEN,
    "type_vocab_size",
    "n_group",
    "mamba_n_groups",
    "mamba_ngroups",
    "n_groups",
    "n_mamba_heads",
    "num_experts_per_token",
    "num_expert_group",
}
# small sizes, and the attributes of configs that get them, in every family; hidden sizes of recurrent layers become 64
_NAMES = {
    1: "n_shared_experts num_shared_experts moe_num_shared_experts bos_token_id topk_group first_k_dense_replace "
    "num_dense_layers",
    2: "num_key_value_heads max_window_layers eos_token_id swa_num_key_value_heads kv_n_heads zero_expert_num "
    "num_kv_shared_layers num_layers_per_stack mamba_dt_rank time_step_rank linear_num_heads linear_num_key_heads",
    4: "num_decoder_attention_heads qk_rope_head_dim "
    "swa_num_attention_heads num_attention_heads_per_layer rotary_dim mamba_n_heads mamba_num_heads "
    "linear_num_value_heads adapter_rank",
    6: "v_head_dim hidden_size_per_layer_input linear_value_head_dim",
    8: "head_dim qk_nope_head_dim dim_head global_head_dim swa_head_dim kv_channels attention_head_size floor_scale "
    "laurel_rank mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size block_size linear_head_dim "
    "linear_key_head_dim",
    12: "q_lora_rank kv_lora_rank qk_head_dim",
    16: "mamba_d_head mamba_head_dim attention_head_dim router_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size dim embed_dim out_hidden_size text_hidden_size output_dim "
    "image_token_embed_dim projection_dim adapter_in_dim adapter_input_size adapter_out_dim word_embed_proj_dim "
    "prediction_head_size mamba_headdim lru_width",
    48: "intermediate_size ffn_dim decoder_ffn_dim dff hidden_dim encoder_ffn_dim projector_hidden_size d_inner dim_ff "
    "ffn_hidden_size intermediate_size_mlp",
    64: "mamba_d_ssm attention_hidden_size",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    VOCABULARY - 1: "mask_token_id sep_token_id cls_token_id",
    WINDOW: "sliding_window sliding_window_size attention_chunk_size",
    2 * WINDOW: "local_attention",
    EXTENDED: "original_max_position_embeddings",
    0: "pad_token_id",
}
SIZES: dict[str, int] = {
    **dict.fromkeys((*LAYER_COUNTS, *HEAD_COUNTS, *EXPERTS), 4),
    **dict.fromkeys(POSITION_COUNTS, POSITIONS),
    **dict.fromkeys(_AT_MOST, 2),
    **{name: size for size, names in _NAMES.items() for name in names.split()},
}
_WINDOW = re.compile(r"window(?!.*layers)|att\w*_chunk")  # under any name
_NO_TEXT = re.compile(r"(image|video|vision|audio|sound|speech|media)\w*_token_(id|index)$")
_OF_VOCABULARY = re.compile("vocab_size|token_(id|index)$")
_NO_PART_OF_IT = {"quantization_config", "id2label", "label2id", "auto_map"}


class Double(TorchFunctionMode):
    """Turns a model's casts to fp32 into casts to fp64, so that norms, routers and softmaxes hide no error."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def tiny_copy(model_class: Any, config: PreTrainedConfig, batch_length: int | None = None) -> PreTrainedModel:
    """Builds a [`tiny_model`] from a config made small by [`shrink`]."""
    return tiny_model(model_class, shrink(config, batch_length))


def shrink(config: PreTrainedConfig, batch_length: int | None = None) -> PreTrainedConfig:
    """Returns a config of the same structure (layer and attention types, rotary positions, experts, windows, caps, tied
    weights) with small sizes and no dropout.

    Args:
        config (`PreTrainedConfig`): The model's config; not changed.
        batch_length (`int`, *optional*): Tokens of a real batch whose ids and positions must fit.
    """
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_PART_OF_IT}
    return type(config).from_dict(_shrunk(values, batch_length))


def tiny_model(model_class: Callable[..., PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a model with random weights, in the default dtype and training mode, identically in every process."""
    prepare(config)
    torch.manual_seed(0)
    model = model_class(config)
    model.to(dtype=torch.get_default_dtype())  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # weights that make attention, norms, sinks and routers all matter
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("A_log"):  # makes states last; initial weights forget them at once
                parameter.copy_(0.2 * noise - 4)
            elif parameter.ndim < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * min(parameter.shape[-2:]) ** -0.5)
    return model.train()


def prepare(config: PreTrainedConfig) -> None:
    """Chooses implementations with which one process computes the whole model, in any dtype."""
    config._experts_implementation = "eager"  # fused ones do not support fp64
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # some versions choose sdpa, which ignores it


def first_position(model: PreTrainedModel) -> int:
    """Returns the position of a first token: RoBERTa and its relatives count from `padding_idx + 1`."""
    if any(map(numbers_tokens, model.modules())):
        return model.config.get_text_config().pad_token_id + 1
    return 0


def note(model: PreTrainedModel) -> str:
    """Returns remarks on a model for its verdict: its layer types, and unusual positions."""
    kinds = Counter(kind.removesuffix("_attention") for kind in getattr(model.config, "layer_types", None) or ())
    facts = []
    if len(kinds) > 1:
        facts.append(f"layers: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    if first_position(model):
        facts.append("positions count from padding_idx + 1")
    return "; ".join(facts)


def _shrunk(values: dict[str, Any], batch_length: int | None) -> dict[str, Any]:
    count = _first_count(values, LAYER_COUNTS)
    layers = _layers(values, count)
    small: dict[str, Any] = {}
    for key, value in values.items():
        in_pixels = key == "window_size" and "patch_size" in values  # a tower's window
        if key in _NO_PART_OF_IT or in_pixels:  # a sub-config's label names; the main config's are removed
            new = value
        elif key == "per_layer_config" and value:
            owns = {int(layer): _shrunk(own, batch_length) for layer, own in value.items()}
            new = {place: _twice(owns[layer]) for place, layer in enumerate(layers) if layer in owns}
        elif isinstance(value, dict):
            new = _shrunk(value, batch_length)
        elif isinstance(value, list) and len(value) == count:
            new = [_small_size(key, value[layer]) for layer in layers]
        elif _lists_layers(key, value, count):
            new = [place for place, layer in enumerate(layers) if layer in value]
        elif batch_length is not None and key in POSITION_COUNTS and isinstance(value, int):
            new = min(max(POSITIONS, batch_length + 2), value)
        elif batch_length is not None and _OF_VOCABULARY.search(str(key)):
            new = value
        elif key in LAYER_COUNTS and value == count:
            new = len(layers)
        else:
            new = _small_size(str(key), value)
        small[key] = new
    if "max_window_layers" in values:
        whole = values["max_window_layers"]
        small["max_window_layers"] = len(layers) if whole >= count else min(whole, len(layers) // 2)
    _shrink_heads(values, small)
    _shrink_states(values, small)
    _shrink_positions(values, small)
    return small


def _first_count(values: dict[str, Any], names: tuple[str, ...]) -> int:
    """Returns the first number that a config has under one of these names, or 0."""
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _small_size(key: str, value: Any) -> Any:
    if isinstance(value, list) and key.endswith("token_id") and value:  # several end-of-sequence tokens
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
    if _NO_TEXT.search(key):
        return max(value, VOCABULARY)  # a batch of text must not contain image tokens
    size = SIZES.get(key, WINDOW if _WINDOW.search(key) else value)
    return min(value, size) if key in _AT_MOST else size


def _layers(values: dict[str, Any], count: int) -> list[int]:
    """Returns layers that represent all: one of each kind in turn."""
    if count <= LAYERS:
        return list(range(count))
    kinds: dict[str, list[int]] = {}
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    telling = [value for value in lists if isinstance(value[0], str) or len({repr(entry) for entry in value}) <= LAYERS]
    indices = [value for key, value in values.items() if _lists_layers(key, value, count)]
    for layer in range(count):
        kind = [value[layer] for value in telling], [layer in value for value in indices]
        kinds.setdefault(repr(kind), []).append(layer)
    turns = zip_longest(*kinds.values())
    in_turn = [layer for turn in turns for layer in turn if layer is not None]
    return in_turn[: max(LAYERS, len(kinds))]


def _lists_layers(key: str, value: Any, count: int) -> bool:
    if not isinstance(value, list) or not LAYER_LISTS.search(key) or len(value) == count:
        return False
    return all(type(layer) is int and 0 <= layer < count for layer in value)


def _twice(sizes: dict[str, Any]) -> dict[str, Any]:
    """Doubles the sizes that one layer sets, so that they differ from the others."""
    return {key: 2 * size if type(size) is int else size for key, size in sizes.items()}


def _shrink_heads(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Keeps key heads equal to query heads, single, or fewer, and keeps the parts of MLA heads."""
    heads = _first_count(values, HEAD_COUNTS)
    for key in {"num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"} & set(values):
        if isinstance(values[key], int) and values[key] > 0:
            small[key] = 4 if values[key] == heads else min(values[key], 2)
    for part in ("qk_rope_head_dim", "qk_head_dim"):
        if values.get("head_dim") and values["head_dim"] == values.get(part):
            small["head_dim"] = small[part]


def _shrink_states(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Makes recurrent heads fill the expanded hidden size, and keeps equal numbers of key and value heads equal."""
    if {"expand", "num_heads", "head_dim", "state_size"} <= set(values):
        small["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
    if "linear_num_value_heads" in values and values["linear_num_value_heads"] == values["linear_num_key_heads"]:
        small["linear_num_value_heads"] = small["linear_num_key_heads"]


def _shrink_positions(values: dict[str, Any], small: dict[str, Any]) -> None:
    """Keeps scaled RoPE in effect, per model or layer type, by extending fewer positions than a batch has."""
    parts = [value for key, value in small.items() if isinstance(value, dict) and "rope" in str(key)]
    ropes = [*parts, *(rope for part in parts for rope in part.values() if isinstance(rope, dict))]
    if any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        small.update(dict.fromkeys(set(POSITION_COUNTS) & set(small), EXTENDED))
    width = small.get("qk_rope_head_dim") or small.get("head_dim") or 8
    before = _rotated_share(values)
    for rope in ropes:
        if before is not None and rope.get("partial_rotary_factor") == before:
            rope["partial_rotary_factor"] = _rotated_share(small)
        share = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
        pairs = int(width * share) // 2
        for key in {"short_factor", "long_factor"} & set(rope):
            rope[key] = [rope[key][index * len(rope[key]) // pairs] for index in range(pairs)]
        if rope.get("mrope_section"):  # time, height and width
            others = len(rope["mrope_section"]) - 1
            rope["mrope_section"] = [1] * others + [pairs - others]


def _rotated_share(sizes: dict[str, Any]) -> float | None:
    """Returns the share of an MLA head that is rotated; `None` for other heads."""
    rotated = sizes.get("qk_rope_head_dim") or 0
    whole = rotated + (sizes.get("qk_nope_head_dim") or 0)
    return rotated / whole if whole else None
