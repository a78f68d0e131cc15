"""Causal convolutions over shards: each segment is preceded by the last tokens before it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..mesh import ContextGroup
from ..plan import Segments
from .gather import Slots, gather_slots, take_part
from .received import Received


def causal_convolution(
    convolution: Callable[[Tensor], Tensor],
    x: Tensor,
    reach: int,
    segments: Segments,
    group: ContextGroup,
    received: Received | None = None,
) -> Tensor:
    """A convolution of each document by itself, wherever its tokens lie.

    The segments of this rank are laid one after another, each behind a halo: the last `reach` tokens of its document
    before it, zeros where the document starts. One call convolves them, and the outputs of the halos are dropped.

    Args:
        convolution (callable): From `(1, channels, tokens)` to as much, causal, whatever computes it.
        x (`torch.Tensor` of shape `(batch, channels, n)`): This rank's tokens.
        reach (`int`): How many earlier tokens an output sees: the width of the kernel less 1.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        `torch.Tensor` of shape `(batch, channels, n)`.
    """
    batch, channels, tokens = x.shape
    rows = x.transpose(1, 2).reshape(batch * tokens, channels)
    own = segments.by_rank[group.rank]
    pieces = [rows[piece.local : piece.local + piece.size] for piece in own]
    slots: Slots = {}
    if segments.most_slots and reach:
        tails = [functional.pad(piece[-reach:], (0, 0, max(0, reach - len(piece)), 0)) for piece in pieces]
        slots = gather_slots(tails, segments, group, received)
    laid: list[Tensor] = []
    for index, piece in enumerate(pieces):
        laid += [_halo(index, reach, segments, group, slots, rows), piece]
    out = convolution(torch.cat(laid).T[None].contiguous())[0].T
    sizes = [size for piece in own for size in (reach, piece.size)]
    kept = torch.cat(out.split(sizes)[1::2]).reshape(batch, tokens, channels).transpose(1, 2)
    return take_part(kept, slots)


def _halo(index: int, reach: int, segments: Segments, group: ContextGroup, slots: Slots, like: Tensor) -> Tensor:
    """The tokens before a segment of this rank: `(reach, channels)`."""
    piece = segments.by_rank[group.rank][index]
    first = max(piece.document, piece.start - reach)
    parts, token = [like.new_zeros(reach - piece.start + first, like.shape[1])], first
    while token < piece.start:
        holder = segments.holder(piece.row, token)
        stop = segments.by_rank[holder[0]][holder[1]].stop
        parts.append(slots[holder][reach - (stop - token) :])
        token = stop
    return torch.cat(parts)
