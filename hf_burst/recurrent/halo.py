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
from .pieces import made_once
from .replay import Shards


def causal_convolution(convolution: Callable[[Tensor], Tensor], x: Tensor, reach: int, shards: Shards) -> Tensor:
    """Convolves each document separately, wherever its tokens lie.

    One call convolves all tokens of this rank in memory order, which is wrong only for each segment's first `reach`
    tokens. A second call recomputes these after a halo: the last `reach` tokens of the document before the segment, or
    zeros at the start of a document.

    Args:
        convolution (callable): Any causal convolution of `(batch, channels, tokens)` to the same shape. Its output and
            its input gradient must be new tensors, because they are written to.
        x (`torch.Tensor` of shape `(batch, channels, n)`): This rank's tokens.
        reach (`int`): Number of earlier tokens that an output sees: the kernel width minus 1.
        shards ([`Shards`]): The parts of the sequences. All ranks call it at the same time.

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
    return _Replaced.apply(convolution(x), right, *edges.replaced)


class _Taken(torch.autograd.Function):
    """All tokens of `(batch, channels, n)`, and the segments' first and last ones, `(taken, channels)`, whose gradients
    are added in place to those of all tokens. That is safe, because only this node uses the convolution's gradient."""

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
        tokens = dx.transpose(1, 2)  # an accumulating index_put_ copies all of it on GPUs if channels come first
        both = tokens[rows, places].index_add(0, firsts, dfirsts)  # repeated tokens add zeros, so order doesn't matter
        tokens[rows, places] = both.index_add(0, tails, dtails)
        return dx, None, None, None, None


class _Replaced(torch.autograd.Function):
    """Replaces the values of some tokens of `(batch, channels, n)` in the same memory. An activation whose derivative
    uses its own output finds these values there, and zeros as their gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, values: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places)
        same_memory = out.detach()
        unnoticed = nullcontext() if out.is_inference() else _unsafe_preserve_version_counter(out)
        with unnoticed:  # autograd would complain of the change
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
    """Indices (int64, on the device) of the tokens at the starts and ends of a rank's segments."""

    distinct: Tensor  # row and position of the rank's tokens that are taken: `(2, distinct)`
    firsts: Tensor  # in `distinct`, the first `reach` of every segment; a shorter one repeats its last, then dropped
    tails: Tensor  # in `distinct`, the last `reach` of segments with a successor, equally many on all ranks
    halos: Tensor  # tokens before segments, in the concatenated tails of all ranks; one past the end is a zero
    kept: Tensor  # the outputs to keep, among those of first tokens
    replaced: Tensor  # row and position of the tokens these outputs belong to: `(2, kept)`


def _edges(segments: Segments, device: torch.device, rank: int, reach: int) -> _Edges:
    own, most = segments.by_rank[rank], segments.most_slots
    nowhere, window = segments.sharding.ranks * most * reach, range(reach)
    exports = [own[index] for holder, index in segments.slots if holder == rank]
    exports += own[:1] * (most - len(exports))  # nobody reads these, but all ranks must send equally much
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
