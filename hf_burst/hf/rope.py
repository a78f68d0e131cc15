"""Rotary positions that depend on the longest position of a forward pass ("dynamic", "longrope"), over several ranks.

Transformers takes the maximum of the position ids that a rotary module is given (`modeling_rope_utils`), on a rank
those of its shard. So the longest position of the whole batch is appended to them, and cut off the result.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnsupportedModelError


class LongestPosition:
    """The longest position of the forward pass under way, which the rotary modules of one model read.

    Args:
        model (`PreTrainedModel`): The model, to whose rotary modules hooks are added.

    Raises:
        UnsupportedModelError: If a layer that may be recomputed in the backward pass has a rotary module of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.value: int | None = None
        self.handles: list[RemovableHandle] = []
        for module in rotary_modules(model):
            self.handles += [
                module.register_forward_pre_hook(self._append, with_kwargs=True),
                module.register_forward_hook(self._cut),
            ]
        if self.handles:
            self.handles.append(model.register_forward_hook(self._forget, always_call=True))

    def _forget(self, *_: Any) -> None:
        """After a pass, also one that failed: what is called next may hold a whole sequence."""
        self.value = None

    def _append(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.value is None:
            return None
        named = "position_ids" in kwargs
        positions = kwargs["position_ids"] if named else args[1]
        longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), self.value)], dim=-1)
        return (args, {**kwargs, "position_ids": longer}) if named else ((args[0], longer, *args[2:]), kwargs)

    def _cut(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.value is None:
            return None
        return tuple(part[:, :-1] for part in output) if isinstance(output, tuple) else output[:, :-1]


def rotary_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules whose rotary frequencies follow from the longest position."""
    found = [module for module in model.modules() if any(_follows_length(module, kind) for kind in _kinds(module))]
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {inner for layer in layers for inner in layer.modules()}
    if inside.intersection(found):
        raise UnsupportedModelError(
            f"{type(model).__name__} has rotary positions that depend on the longest position inside of its layers, "
            "where they cannot be known when a layer is recomputed. Set config.rope_parameters['rope_type'] to another."
        )
    return found


def _kinds(module: nn.Module) -> Iterator[str]:
    kinds = getattr(module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if isinstance(kind, str):
            yield kind


def _follows_length(module: nn.Module, kind: str) -> bool:
    """`PhimoeRotaryEmbedding` scales by the longest position whatever its type is."""
    phimoe = type(module).__name__ == "PhimoeRotaryEmbedding" and kind != "default"
    return phimoe or "dynamic" in kind or kind == "longrope"
