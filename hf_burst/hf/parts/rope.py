"""Rotary positions that depend on the longest position of a pass ("dynamic", "longrope"), over several ranks.

Transformers takes the maximum of the position ids that a rotary module is given (`modeling_rope_utils`), which on a
rank are those of its shard. So the longest position of the batch is appended to them, and cut off the result.
"""

from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ..admission import LAYERS
from ..batches.sharded import LAYOUT_KEY, ShardedBatch, longest_position
from ..forward_pass import Batch, Call
from ..view import ModelView
from .base import Args, Handles, Kwargs, Part


class LongestPosition(Part):
    """Tells a model's rotary modules the longest position of the current pass."""

    def __init__(self) -> None:
        self.rotary: list[nn.Module] = []  # whose frequencies depend on the longest position, or may later
        self.longest: int | None = None  # of the batch, in a pass whose frequencies depend on it

    def look(self, view: ModelView) -> Handles:
        self.rotary = [module for module in view.modules if hasattr(module, "rope_type")]
        appends = [module.register_forward_pre_hook(self._append, with_kwargs=True) for module in self.rotary]
        return appends + [module.register_forward_hook(self._cut) for module in self.rotary]

    def check(self, call: Call, batch: Batch) -> None:
        rotary = list(filter(follows_length, self.rotary))
        if not rotary:
            return
        if any(module in call.view.inside(layer) for layer in call.view.layers for module in rotary):
            raise UnsupportedModelError(
                f"{type(call.model).__name__} has rotary positions that depend on the longest position inside of its "
                "layers, where they cannot be known when a layer is recomputed. Set "
                "config.rope_parameters['rope_type'] to another."
            )
        about: ShardedBatch | None = call.given.get(LAYOUT_KEY)
        self.longest = longest_position(call.given) if about is None else about.longest
        call.agreement.add("longest position", self.longest)

    def end(self) -> None:
        self.longest = None  # the next call may hold a whole sequence

    def _append(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if self.longest is None or not follows_length(module):
            return None
        named = "position_ids" in kwargs
        positions = kwargs["position_ids"] if named else args[1]
        longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), self.longest)], dim=-1)
        return (args, {**kwargs, "position_ids": longer}) if named else ((args[0], longer, *args[2:]), kwargs)

    def _cut(self, module: nn.Module, args: Args, output: Any) -> Any:
        if self.longest is None or not follows_length(module):
            return None
        return tuple(part[:, :-1] for part in output) if isinstance(output, tuple) else output[:, :-1]


def follows_length(module: nn.Module) -> bool:
    """Returns whether the rotary positions of a module depend on the longest position."""
    rope = getattr(module, "rope_type", None)
    kinds = [kind for kind in (rope.values() if isinstance(rope, dict) else [rope]) if isinstance(kind, str)]
    if LAYERS.get(type(module).__name__) == "longest position":  # scales by the longest position whatever its type is
        return any(kind != "default" for kind in kinds)
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)
