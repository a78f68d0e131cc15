"""Causal convolutions over shards: the first tokens of a segment see the last tokens before it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..kernels import from_host
from ..numerics import refuse_second_derivative
from ..plan import Segments
from .once import made_once
from .replay import Shards


def causal_convolution(convolution: Callable[[Tensor], Tensor], x: Tensor, reach: int, shards: Shards) -> Tensor:
    """A convolution of each document by itself, wherever its tokens lie.

    One call convolves all tokens of this rank as they lie in memory, which is wrong for the first `reach` tokens of
    every segment only. Another one convolves these anew, each behind a halo: the last `reach` tokens of its document
    before the segment, zeros where the document starts.

    Args:
        convolution (callable): From `(batch, channels, tokens)` to as much, causal, whatever computes it. Its output,
            and its gradient of what goes in, are tensors of its own, which are written to.
        x (`torch.Tensor` of shape `(batch, channels, n)`): This rank's tokens.
        reach (`int`): How many earlier tokens an output sees: the width of the kernel less 1.
        shards ([`Shards`]): The parts of the sequences. Every rank calls it at the same time.

    Returns:
        `torch.Tensor` of shape `(batch, channels, n)`.
    """
    edges = made_once(shards.segments, _edges, x.device, shards.group.rank, reach)
    if not len(edges.replaced[0]):
        return convolution(x)
    channels = x.shape[1]
    x, firsts, tails = _Taken.apply(x, *edges.distinct, edges.firsts, edges.tails)
    zeros = x.new_zeros(1, channels)
    received = shards.replay.all_gather(tails, shards.group) if len(tails) else ()
    halos = torch.cat([*received, zeros]).index_select(0, edges.halos)
    pieces = torch.cat([part.view(-1, reach, channels) for part in (halos, firsts)], dim=1)
    anew = convolution(pieces.transpose(1, 2)).transpose(1, 2)[:, reach:]
    right = anew.reshape(-1, channels).index_select(0, edges.kept)
    replaced: Tensor = _Replaced.apply(convolution(x), right, *edges.replaced)
    return replaced


class _Taken(torch.autograd.Function):
    """All tokens of `(batch, channels, n)`, and the first and last ones of segments, `(taken, channels)`. Gradients of
    these are added to those of all in their place: the convolution made them, for nobody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*indices)
        rows, places, firsts, tails = indices
        distinct = x.transpose(1, 2)[rows, places]
        return x.view_as(x), distinct.index_select(0, firsts), distinct.index_select(0, tails)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dfirsts: Tensor, dtails: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        rows, places, firsts, tails = ctx.saved_tensors
        tokens = dx.transpose(1, 2)  # on GPUs index_put_ that accumulates copies all of it, where channels come first
        both = tokens[rows, places].index_add(0, firsts, dfirsts)  # what is there twice adds zeros: in any order
        tokens[rows, places] = both.index_add(0, tails, dtails)
        return dx, None, None, None, None


class _Replaced(torch.autograd.Function):
    """`(batch, channels, n)` with other values for some tokens, in the same memory. An activation that is derived by
    its own output finds these values there, and zeros as their gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, values: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places)
        same_memory = out.detach()
        unnoticed = nullcontext() if out.is_inference() else _unsafe_preserve_version_counter(out)
        with unnoticed:  # autograd would say that it was changed
            same_memory.transpose(1, 2).index_put_((rows, places), values)
        return same_memory

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_derivative()
        kept, where = dout.clone(), ctx.saved_tensors
        kept.transpose(1, 2).index_put_(where, dout.new_zeros(()))
        return kept, dout.transpose(1, 2)[where], None, None


@dataclass(frozen=True)
class _Edges:
    """Where the tokens at the beginnings and ends of a rank's segments lie, as int64 indices on its device."""

    distinct: Tensor  # tokens of the rank that are taken, by row and place: `(2, distinct)`
    firsts: Tensor  # among them, the first `reach` of every segment; a shorter one repeats its last, which is dropped
    tails: Tensor  # among them, the last `reach` of segments with a successor, equally many on all ranks
    halos: Tensor  # what comes before segments, among the tails of all ranks in a row; one beyond the last is a zero
    kept: Tensor  # the outputs that are kept, among those of first tokens
    replaced: Tensor  # the tokens of the rank whose outputs they are: `(2, kept)`


def _edges(segments: Segments, device: torch.device, rank: int, reach: int) -> _Edges:
    own, most = segments.by_rank[rank], segments.most_slots
    nowhere, window = segments.sharding.ranks * most * reach, range(reach)
    exports = [own[index] for holder, index in segments.slots if holder == rank]
    exports += own[:1] * (most - len(exports))  # nobody reads it, but all ranks send as much
    halos = []
    for piece in own:
        halo = list[int]()
        for token in islice(segments.text_before(piece), reach):
            holder = segments.holder(piece.row, token)
            from_end = segments.by_rank[holder[0]][holder[1]].stop - token
            halo.insert(0, (holder[0] * most + segments.slots[holder] + 1) * reach - from_end)
        halos += [nowhere] * (reach - len(halo)) + halo
    kept = [(place, step) for place, piece in enumerate(own) for step in range(min(reach, piece.size))]
    firsts = [piece.local + min(step, piece.size - 1) for piece in own for step in window]
    tails = [piece.local + max(piece.size - reach + step, 0) for piece in exports for step in window]
    numbers = {token: number for number, token in enumerate(dict.fromkeys([*firsts, *tails]))}
    replaced, tokens = [own[place].local + step for place, step in kept], segments.sharding.tokens(rank)
    indices: list[Sequence[Any]] = [
        [[token // tokens for token in numbers], [token % tokens for token in numbers]],
        [numbers[token] for token in firsts],
        [numbers[token] for token in tails],
        halos,
        [place * reach + step for place, step in kept],
        [[token // tokens for token in replaced], [token % tokens for token in replaced]],
    ]
    return _Edges(*(from_host(index, torch.int64, device) for index in indices))
