"""Rotary positions that depend on the longest position of a forward pass ("dynamic", "longrope"), over several ranks.

Transformers takes the maximum of the position ids that a rotary module is given (`modeling_rope_utils`), on a rank
those of its shard. So the longest position of the whole batch is appended to them, and cut off the result.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UnsupportedModelError
from ..sharded import LAYOUT_KEY, ShardedBatch, longest_position
from .base import ForwardPass, Part


class LongestPosition(Part):
    """Tells the rotary modules of a model the longest position of the pass under way.

    Args:
        model (`PreTrainedModel`): The model.

    Raises:
        UnsupportedModelError: If a layer that may be recomputed in the backward pass has a rotary module of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.needed = bool(rotary_modules(model))
        self.value: int | None = None

    def install(self, model: PreTrainedModel) -> Sequence[RemovableHandle]:
        handles = []
        for module in rotary_modules(model):
            handles.append(module.register_forward_pre_hook(self._append, with_kwargs=True))
            handles.append(module.register_forward_hook(self._cut))
        return handles

    def prepare(self, run: ForwardPass) -> None:
        if self.needed:
            run.facts["longest position"] = self._longest(run)

    def begin(self, run: ForwardPass) -> None:
        self.value = run.facts.get("longest position")

    def end(self) -> None:
        self.value = None  # what is called next may hold a whole sequence

    @staticmethod
    def _longest(run: ForwardPass) -> int:
        about: ShardedBatch | None = run.batch.get(LAYOUT_KEY)
        if about is not None:
            return about.longest
        return run.layout.length - 1 if run.explicit else longest_position(run.batch)

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
    rotary = [module for module in model.modules() if any(_follows_length(module, kind) for kind in _kinds(module))]
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {inner for layer in layers for inner in layer.modules()}
    if inside.intersection(rotary):
        raise UnsupportedModelError(
            f"{type(model).__name__} has rotary positions that depend on the longest position inside of its layers, "
            "where they cannot be known when a layer is recomputed. Set config.rope_parameters['rope_type'] to another."
        )
    return rotary


def _kinds(module: nn.Module) -> Iterator[str]:
    kinds = getattr(module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if isinstance(kind, str):
            yield kind


def _follows_length(module: nn.Module, kind: str) -> bool:
    """`PhimoeRotaryEmbedding` scales by the longest position whatever its type is."""
    phimoe = type(module).__name__ == "PhimoeRotaryEmbedding" and kind != "default"
    return phimoe or "dynamic" in kind or kind == "longrope"
