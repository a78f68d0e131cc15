"""Gathers the exports of segments over the ranks: one slot for each segment with a successor."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .replay import Shards

Slots = dict[tuple[int, int], Tensor]  # by the segment's rank and index there


def gather_slots(own: Mapping[int, Tensor], shards: Shards) -> Slots:
    """Returns the exports of all segments with a successor, tensors of one shape, by rank and index. `own` holds those
    of [`Shards.exports`], by index. The backward pass sums the gradients of all ranks, all of which must join it, see
    [`join_backward`]."""
    mine = [own[index] for index in sorted(shards.exports)]
    mine += mine[:1] * (shards.segments.most_slots - len(mine))  # padding that nobody reads
    received = shards.replay.all_gather(torch.stack(mine), shards.group)
    every = [tensor.unbind() for tensor in received]  # so that gradients are stacked once
    return {piece: every[piece[0]][place] for piece, place in shards.segments.slots.items()}


def join_backward(output: Tensor, slots: Iterable[Tensor]) -> Tensor:
    """Returns the output, whose backward pass makes this rank join the slots' backward pass even if it used none."""
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
