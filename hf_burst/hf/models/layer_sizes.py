"""Layer sizes: those that configs name, and those of recurrent layers, read from their modules."""

import inspect
import logging
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from ...plan import MaskPattern, RecurrentSize, choose_recurrence
from ...plan.layer_sizes import LayerSizes
from ...plan.recurrence import RuleKind, Way
from ...ranks.layout import SequenceLayout
from ...recurrent import fla_installed
from ..view import ModelView
from .gated_norm import activation_of
from .recurrent import functions_of, recurrent_modules
from .support import has_attention, patterns_of_layers
from .task import task_of

logger = logging.getLogger(__name__)

# copies of a gated output that flash-linear-attention's norm saves, and copies in its backward pass
FUSED_NORM = (3, 2)
_DELTA = "torch_chunk_gated_delta_rule"
_FIELDS = ("heads", "keys", "key_heads", "values", "decays")
_RULES: dict[str, tuple[RuleKind, tuple[str, ...]]] = {  # by the rule that a module calls, attributes with its fields
    _DELTA: ("delta", ("num_v_heads", "head_k_dim", "num_k_heads", "head_v_dim")),
    "chunk_kimi_delta_attention": ("delta", ("num_heads", "head_dim", "num_heads", "head_dim", "head_dim")),
    "mamba2_chunk_scan": ("scan", ("num_heads", "ssm_state_size", "n_groups", "head_dim")),
    "mamba_selective_scan": ("selective", ("intermediate_size", "ssm_state_size")),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_INNER = ("intermediate_size", "ffn_dim", "n_inner")


def layer_sizes(view: ModelView) -> LayerSizes:
    """Returns the layer sizes of the view's language model, read from its config."""
    text, layers = view.root.config.get_text_config(), view.find(attending_layers)
    first = layers[0][0] if layers else None
    q_heads, kv_heads = (0, 0) if first is None else heads_of(first)[:2]
    _, chosen = experts_of(text)
    names = ("moe_intermediate_size", *_INNER) if chosen else _INNER
    inner = next((value for name in names if (value := getattr(text, name, None))), 4 * text.hidden_size)
    widest = max(inner) if isinstance(inner, list | tuple) else inner
    patterns = Counter[MaskPattern]()
    for layer, pattern in layers:
        patterns[pattern] += head_size(layer)
    mean = patterns.total() / max(1, len(layers))
    kinds = Counter((pattern, heads_of(layer)) for layer, pattern in layers)
    differ = len({heads for _, heads in kinds}) > 1
    return LayerSizes(
        layers=getattr(text, "num_hidden_layers", 1),
        hidden=text.hidden_size,
        inner=chosen * (widest + text.hidden_size) if chosen else widest,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=round(mean),
        value_dim=getattr(first, "v_head_dim", None) or round(mean),
        patterns=tuple((pattern, total / mean) for pattern, total in patterns.items()),
        recurrent=view.find(recurrent_sizes),
        heads=tuple((*kind, count) for kind, count in kinds.items()) if differ else (),
    )


def attending_layers(view: ModelView) -> list[tuple[PreTrainedConfig, MaskPattern]]:
    """Returns the config and mask pattern of each layer that has attention."""
    return patterns_of_layers(view.root.config, view.find(task_of)) if view.find(has_attention) else []


def heads_of(layer: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Returns query heads, key heads, and the sizes of those of queries and keys, and of values."""
    q_heads, size = layer.num_attention_heads, head_size(layer)
    return (
        q_heads,
        getattr(layer, "num_key_value_heads", None) or q_heads,
        size,
        getattr(layer, "v_head_dim", 0) or size,
    )


def head_size(layer: PreTrainedConfig) -> int:
    """Returns the head size of queries and keys."""
    named = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    return int(named or layer.hidden_size // layer.num_attention_heads)


def experts_of(text: Any) -> tuple[int, int]:
    """Returns the number of experts per layer and of experts per token, read from a language model's config; 0 and 0
    without experts, even if the model class could have some."""
    experts = _first(text, EXPERTS, 0)
    return experts, _first(text, CHOSEN, 1) if experts else 0


def is_experts(module: nn.Module, weight: Tensor) -> bool:
    """Returns whether a module's weight is the experts of a layer, in one tensor of three dimensions."""
    return "Experts" in type(module).__name__ and weight.ndim == 3 and min(weight.shape[1:]) > 1


def dtype_of_states(view: ModelView) -> torch.dtype:
    """Returns the dtype of hidden states: that of the embeddings, or FSDP2's mixed-precision dtype."""
    embeddings: Any = view.root.get_input_embeddings()
    if isinstance(embeddings.weight, DTensor) and (units := view.units_of_fsdp2):
        return units[0]._get_fsdp_state()._mp_policy.param_dtype or embeddings.weight.dtype
    return embeddings.weight.dtype


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """Returns the first of these attributes that is an integer."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)


def recurrent_sizes(view: ModelView) -> tuple[RecurrentSize, ...]:
    """Returns the sizes of a model's recurrent layers, one entry per kind and size; empty if any size is unknown."""
    sizes = [_size_of(view.part(module)) for module in view.find(recurrent_modules)]
    known = Counter(size for size in sizes if size is not None)
    return () if None in sizes else tuple(replace(size, layers=count) for size, count in known.items())


@lru_cache(maxsize=64)
def chosen_way(hybrid: tuple[RecurrentSize, ...], layout: SequenceLayout, rank: int) -> Way:
    """Returns the recurrence schedule of a pass. Rank 0 logs the reason, at debug level for packed documents, because
    every batch has its own choice."""
    way, reason = choose_recurrence(hybrid, layout.segments)
    if rank == 0:
        count = sum(len(row) - 1 for row in layout.documents) - (layout.batch_size if layout.padding else 0)
        level = logging.INFO if count == layout.batch_size else logging.DEBUG
        batch = f"{layout.batch_size} x {layout.length - layout.padding} tokens, documents: {count}"
        logger.log(level, "hf_burst passes recurrent layers by %s for %s (%s)", way, batch, reason)
    return way


def _size_of(view: ModelView) -> RecurrentSize | None:
    """Returns the size of one recurrent module, read from attributes that Transformers' classes of this kind share."""
    module, forward = view.root, type(view.root).forward
    functions = functions_of(forward)
    if not functions:  # its own forward computes the states, so its sizes are unknown
        return None
    convolution = next((inner for inner in view.modules if isinstance(inner, nn.Conv1d)), None)
    size = RecurrentSize("convolution", 1)
    if convolution is not None:
        size = replace(size, channels=convolution.out_channels, reach=convolution.kernel_size[0] - 1)
    rule = next((rule for rule in _RULES if rule in functions), None)
    if rule is None:
        return size
    name, attributes = _RULES[rule]
    try:
        found = [getattr(module, attribute) for attribute in attributes]
    except AttributeError:  # a custom class
        return None
    own: dict[str, Any] = {"key_heads": 1, "values": 1} | dict(zip(_FIELDS, found, strict=False))
    if name == "delta" and fla_installed() and any(activation_of(inner) is not None for inner in view.modules):
        own["norm_copies"] = FUSED_NORM  # of the kernel that runs on GPUs
    if rule == _DELTA:
        # keys for every value head, as in older releases of Transformers
        own["repeats_keys"] = "repeat_interleave" in inspect.unwrap(forward).__code__.co_names
        if find_spec("causal_conv1d"):
            own["convolution_copies"] = 1
    return replace(size, kind=name, **own)
