"""Layer sizes, as configs name them."""

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from ...plan import MaskPattern
from ...plan.layer_sizes import LayerSizes
from ..view import ModelView
from .hybrid import recurrent_sizes
from .support import has_attention, patterns_of_layers
from .task import task_of

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_INNER = ("intermediate_size", "ffn_dim", "n_inner")


def layer_sizes(view: ModelView) -> LayerSizes:
    """Returns the layer sizes of the view's language model, read from its config."""
    text, layers = view.root.config.get_text_config(), view.find(attending_layers)
    q_heads = layers[0][0].num_attention_heads if layers else 0
    _, chosen = experts_of(text)
    names = ("moe_intermediate_size", *_INNER) if chosen else _INNER
    inner = next((value for name in names if (value := getattr(text, name, None))), 4 * text.hidden_size)
    widest = max(inner) if isinstance(inner, list | tuple) else inner
    sizes = [head_size(layer) for layer, _ in layers]
    patterns, mean = Counter[MaskPattern](), sum(sizes) / max(1, len(sizes))
    for (_, pattern), size in zip(layers, sizes, strict=True):
        patterns[pattern] += size
    return LayerSizes(
        layers=getattr(text, "num_hidden_layers", 1),
        hidden=text.hidden_size,
        inner=chosen * (widest + text.hidden_size) if chosen else widest,
        q_heads=q_heads,
        kv_heads=(getattr(layers[0][0], "num_key_value_heads", None) or q_heads) if layers else 0,
        head_dim=round(mean),
        value_dim=(getattr(layers[0][0], "v_head_dim", None) or round(mean)) if layers else 0,
        patterns=tuple((pattern, total / mean) for pattern, total in patterns.items()),
        recurrent=view.find(recurrent_sizes),
    )


def attending_layers(view: ModelView) -> list[tuple[PreTrainedConfig, MaskPattern]]:
    """Returns the config and mask pattern of each layer that has attention."""
    return patterns_of_layers(view.root.config, view.find(task_of)) if view.find(has_attention) else []


def head_size(layer: PreTrainedConfig) -> int:
    """Returns the head size of queries and keys."""
    named = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    return int(named or layer.hidden_size // layer.num_attention_heads)


def experts_of(text: Any) -> tuple[int, int]:
    """Returns the number of experts per layer and of experts per token, read from a language model's config; 0 and 0
    without experts, even if the model class could have some."""
    experts = _first(text, _EXPERTS, 0)
    return experts, _first(text, _CHOSEN, 1) if experts else 0


def dtype_of_states(view: ModelView) -> torch.dtype:
    """Returns the dtype of hidden states: that of the embeddings, or FSDP2's mixed-precision dtype."""
    embeddings: Any = view.root.get_input_embeddings()
    if isinstance(embeddings.weight, DTensor) and (units := view.units_of_fsdp2):
        return units[0]._get_fsdp_state()._mp_policy.param_dtype or embeddings.weight.dtype
    return embeddings.weight.dtype


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """Returns the first of these attributes that is an integer."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)
