"""What the segments of a document pass from rank to rank: one slot for each segment that has a successor."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .replay import Shards

Slots = dict[tuple[int, int], Tensor]  # by rank and place of the segment


def gather_slots(own: Mapping[int, Tensor], shards: Shards) -> Slots:
    """What every segment with a successor exports, by its rank and place; tensors of one shape. `own` has those of
    [`Shards.exports`], by their places. Gradients of all ranks are summed on the way back, in which all ranks must
    take part, see [`join_backward`]."""
    mine = [own[index] for index in sorted(shards.exports)]
    mine += mine[:1] * (shards.segments.most_slots - len(mine))  # nobody reads it
    received = shards.replay.all_gather(torch.stack(mine), shards.group)
    every = [tensor.unbind() for tensor in received]  # so that gradients are stacked once
    return {piece: every[piece[0]][place] for piece, place in shards.segments.slots.items()}


def join_backward(output: Tensor, slots: Iterable[Tensor]) -> Tensor:
    """The output itself, by whose backward pass this rank takes part in that of the slots, also where it used none."""
    return _JoinBackward.apply(output, *slots)


class _JoinBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *slots: Tensor) -> Tensor:
        ctx.like = [(slot.shape, slot.dtype, slot.device) for slot in slots]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return gradients[0], *zeros
