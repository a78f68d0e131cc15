"""The sizes of a model of Transformers, counted without its weights."""

from copy import deepcopy

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..plan import SHAPES, ModelSize
from .support import layer_patterns
from .task import task_of

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def model_size(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str | None = None) -> ModelSize:
    """Counts the weights of a model that is made on torch's `meta` device, where nothing takes memory.

    Args:
        model_class (`type`): A class with a language-model head.
        config (`PreTrainedConfig`): Its config; not changed.
        name (`str`, *optional*): What to call it; the name of the class by default.
    """
    with torch.device("meta"):
        model = model_class(deepcopy(config))
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    share = _first(text, _CHOSEN, 1) / _first(text, _EXPERTS, 1)
    used, attention = 0.0, 0
    for path, weight in model.named_parameters():
        if weight is not head_weight and any(weight is table for table in tables):
            continue
        used += weight.numel() * (share if "experts." in path and "shared" not in path else 1)
        attention += weight.numel() if "attn" in path or "attention" in path else 0
    heads, in_head = text.num_attention_heads, 0 if head_weight is None else head_weight.numel()
    head_dim = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return ModelSize(
        name=name or model_class.__name__,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=round((used - in_head - attention) / (3 * text.hidden_size * text.num_hidden_layers)),  # as if gated
        q_heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=getattr(text, "v_head_dim", None) or head_dim,
        vocabulary=text.vocab_size,
        weights=sum(weight.numel() for weight in model.parameters()),
        used=round(used),
        head=in_head,
        tied=any(head_weight is table for table in tables),
        adapted=sum(module.in_features + module.out_features for module in linear),
        patterns=tuple(layer_patterns(model.config, task_of(model)).items()),
    )


def shape_named(name: str) -> PreTrainedConfig | None:
    """The config of one of [`SHAPES`]; `None` for other names."""
    return AutoConfig.for_model(**SHAPES[name]) if name in SHAPES else None


def _first(config: PreTrainedConfig, names: tuple[str, ...], default: int) -> int:
    """The first of these numbers that a config has."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)
