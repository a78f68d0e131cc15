"""Sizes of recurrent layers, for the planner."""

import inspect
import logging
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torch import nn

from ...plan import RecurrentSize, choose_recurrence
from ...plan.recurrence import RuleKind, Way
from ...ranks.layout import SequenceLayout
from ...recurrent import fla_installed
from ..view import ModelView
from .gated_norm import activation_of
from .recurrent import functions_of, recurrent_modules

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
    module, kind = view.root, type(view.root)
    functions = functions_of(kind.forward)
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
    if name == "delta":
        own["norm_copies"] = _norm_copies(view)
    if rule == _DELTA:
        own["repeats_keys"] = _repeats_keys(kind)
        own["convolution_copies"] = 1 if find_spec("causal_conv1d") else size.convolution_copies
    return replace(size, kind=name, **own)


def _norm_copies(view: ModelView) -> tuple[int, int]:
    """Returns the copies that the gated norm of a delta rule saves, for the kernel that runs on GPUs."""
    fused = fla_installed() and any(activation_of(inner) is not None for inner in view.modules)
    return FUSED_NORM if fused else RecurrentSize.norm_copies


def _repeats_keys(kind: Any) -> bool:
    """Returns whether a layer repeats its keys for every value head, as older releases of Transformers do."""
    try:
        return "repeat_interleave" in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # no source
        return True
