"""The sizes of a model of Transformers, counted without its weights."""

import re
from collections import Counter
from copy import deepcopy

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ConfigError, UnsupportedModelError
from ..plan import SHAPES, MaskPattern, ModelSize
from .support import check_model, patterns_of_layers
from .task import task_of

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def model_size(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str | None = None) -> ModelSize:
    """Counts the weights of a model that is made on torch's `meta` device, where nothing takes memory.

    Args:
        model_class (`type`): A class with a language-model head.
        config (`PreTrainedConfig`): Its config; not changed.
        name (`str`, *optional*): What to call it; the name of the class by default.

    Raises:
        ConfigError: If no model can be made of this config, or it does not name its sizes.
        UnsupportedModelError: If hf_burst never serves such a model.
    """
    try:
        return _counted(model_class, config, name or model_class.__name__)
    except UnsupportedModelError:
        raise
    except Exception as problem:  # whatever the code of a model raises
        cause = f"{type(problem).__name__}: {str(problem).strip()[:200]}"
        raise ConfigError(
            f"The sizes of {name or model_class.__name__} ({model_class.__name__}) cannot be told by its config "
            f"({cause}). Give the config.json of a model of this class that can be loaded."
        ) from problem


def _counted(model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> ModelSize:
    """The sizes of a model."""
    with torch.device("meta"):
        model = model_class(deepcopy(config))
    check_model(model)
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    experts = _first(text, _EXPERTS, 1)
    share = _first(text, _CHOSEN, 1) / experts
    used, attention = 0.0, 0
    for path, weight in model.named_parameters():
        if weight is not head_weight and any(weight is table for table in tables):
            continue
        routed = ("experts." in path and not re.search("shared|router", path)) or (
            weight.ndim == 3 and len(weight) == experts
        )
        used += weight.numel() * (share if routed else 1)
        attention += weight.numel() if "attn" in path or "attention" in path else 0
    in_head = 0 if head_weight is None else head_weight.numel()
    layers = patterns_of_layers(model.config, task_of(model))
    if not layers:
        raise UnsupportedModelError(f"{name} has no attention, and only layers with attention are predicted.")
    sizes = [_head_dim(layer) for layer, _ in layers]
    mean, patterns = sum(sizes) / len(sizes), Counter[MaskPattern]()
    for (_, pattern), size in zip(layers, sizes, strict=True):
        patterns[pattern] += size
    first = layers[0][0]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    shapes = [module.weight.shape[:: -1 if isinstance(module, nn.Linear) else 1] for module in linear]  # inputs first
    return ModelSize(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=round((used - in_head - attention) / (3 * text.hidden_size * text.num_hidden_layers)),  # as if gated
        q_heads=first.num_attention_heads,
        kv_heads=getattr(first, "num_key_value_heads", None) or first.num_attention_heads,
        head_dim=round(mean),
        value_dim=getattr(first, "v_head_dim", None) or round(mean),
        vocabulary=text.vocab_size,
        weights=sum(weight.numel() for weight in model.parameters()),
        used=round(used),
        head=in_head,
        tied=any(head_weight is table for table in tables),
        adapted=sum(inputs + outputs for inputs, outputs in shapes),
        adapter_inputs=sum(inputs for inputs, _ in shapes),
        patterns=tuple((pattern, total / mean) for pattern, total in patterns.items()),
    )


def shape_named(name: str) -> PreTrainedConfig | None:
    """The config of one of [`SHAPES`]; `None` for other names."""
    sizes = SHAPES.get(name.lower())
    return AutoConfig.for_model(**sizes) if sizes else None


def _head_dim(layer: PreTrainedConfig) -> int:
    """The size of the heads of queries and keys."""
    named = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    return int(named or layer.hidden_size // layer.num_attention_heads)


def _first(config: PreTrainedConfig, names: tuple[str, ...], default: int) -> int:
    """The first of these numbers that a config has."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)
