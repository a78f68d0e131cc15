"""What the segments of a document hand on from rank to rank: one slot for each segment that has a successor."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..plan import Segments
from ..ranks.group import ContextGroup
from .received import Received

Slots = dict[tuple[int, int], Tensor]  # by rank and place of the segment


def handing_on(segments: Segments, group: ContextGroup) -> set[int]:
    """The segments of this rank that hand something on; the first one, to nobody, if there are none. All ranks send,
    so that all take part in the backward pass."""
    return {index for rank, index in segments.slots if rank == group.rank} or {0}


def gather_slots(
    own: Mapping[int, Tensor], segments: Segments, group: ContextGroup, received: Received | None = None
) -> Slots:
    """What every segment with a successor hands on.

    Args:
        own (mapping from `int` to `torch.Tensor`, all of one shape): What the segments of this rank hand on, by their
            place: at least those of [`handing_on`].
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        `dict` from rank and place of a segment to a tensor of that shape. Gradients of all ranks are summed on the way
        back; all ranks must take it, see [`take_part`].
    """
    mine = [own[index] for index in sorted(handing_on(segments, group))]
    mine += mine[:1] * (segments.most_slots - len(mine))  # nobody reads it
    shards = (received or Received()).all_gather(torch.stack(mine), group)
    every = [shard.unbind() for shard in shards]  # whose gradients are stacked once
    return {piece: every[piece[0]][place] for piece, place in segments.slots.items()}


def take_part(output: Tensor, slots: Iterable[Tensor]) -> Tensor:
    """The output itself, by whose backward pass this rank takes part in that of the slots, also where it used none."""
    return _TakePart.apply(output, *slots)


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *slots: Tensor) -> Tensor:
        ctx.like = [(slot.shape, slot.dtype, slot.device) for slot in slots]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return gradients[0], *zeros
