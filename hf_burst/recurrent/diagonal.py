"""Recurrences of single numbers over shards, `h_t = a_t h_{t-1} + b_t`: those of RG-LRU (arXiv 2402.19427).

What a run of tokens does to a number is `h_out = (a_1 ... a_n) h_in + h_own`. Both are found by one call: beside the
inputs, in which every run begins with zero, go inputs of a run that begins with one and is given nothing more.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import from_host
from ..numerics import accumulation_dtype
from ..plan import Segments
from ..ranks.group import ContextGroup
from .gather import handing_on, take_part
from .once import made_once
from .pieces import Rule
from .received import Received
from .scan import scan_by_channels
from .states import by_number, incoming_states

_BLOCK = 32  # tokens that are computed side by side


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    """`h_t = a_t h_{t-1} + b_t` with `h_0 = 0`, all tokens of a block side by side (Hillis and Steele 1986), then the
    ends of the blocks in the same way.

    Args:
        a, b (`torch.Tensor` of shape `(batch, tokens, channels)`): Of each token.

    Returns:
        `torch.Tensor` of that shape: h.
    """
    batch, tokens, channels = a.shape
    size = min(_BLOCK, tokens)
    padding = (0, 0, 0, -tokens % size)
    a, b = (functional.pad(x, padding).view(batch, -1, size, channels) for x in (a, b))
    step = 1
    while step < size:  # each token knows of `step` tokens, itself included
        earlier_a, earlier_b = functional.pad(a, (0, 0, step, -step), value=1.0), functional.pad(b, (0, 0, step, -step))
        a, b = a * earlier_a, b + a * earlier_b
        step *= 2
    if a.shape[1] > 1:
        ends = recurrence(a[:, :-1, -1], b[:, :-1, -1])
        b = b + a * functional.pad(ends, (0, 0, 1, 0))[:, :, None]
    return b.flatten(1, 2)[:, :tokens]


def recurrence_by_states(
    a: Tensor, b: Tensor, segments: Segments, group: ContextGroup, received: Received | None = None
) -> Tensor:
    """The recurrence of each document by itself; states pass from rank to rank.

    Args:
        a, b (`torch.Tensor` of shape `(batch, n, channels)`): Of this rank's tokens. It is computed in fp32, or fp64.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        `torch.Tensor` of shape `(batch, n, channels)`, in the dtype of b.
    """
    own, dtype, shape = segments.by_rank[group.rank], accumulation_dtype(b.dtype), b.shape
    flat, starts = a.to(dtype).flatten(0, 1), made_once(segments, _starts, b.device, group.rank)
    apart = flat.index_fill(0, starts, 0).view(shape)  # nothing passes from one run to the next
    if not segments.slots:
        return recurrence(apart, b.to(dtype)).to(b.dtype)
    begun = torch.zeros_like(flat).index_copy(0, starts, flat[starts]).view(shape)
    both = recurrence(torch.cat([apart, apart]), torch.cat([b.to(dtype), begun]))
    sizes, hand_on = [piece.size for piece in own], handing_on(segments, group)
    outputs, transitions = (list(half.flatten(0, 1).split(sizes)) for half in both.chunk(2))
    handed = {index: (outputs[index][-1], transitions[index][-1]) for index in hand_on}
    incoming, slots = incoming_states(handed, by_number, segments, group, received)
    for index, state in incoming.items():
        outputs[index] = outputs[index] + transitions[index] * state
    return take_part(torch.cat(outputs).view(shape).to(b.dtype), slots)


def _starts(segments: Segments, device: torch.device, rank: int) -> Tensor:
    return from_host([piece.local for piece in segments.by_rank[rank]], torch.int64, device)


def recurrence_by_channels(a: Tensor, b: Tensor, segments: Segments, group: ContextGroup) -> Tensor:
    """The same by an exchange: every rank has whole sequences of some channels. See [`recurrence_by_states`]."""
    dtype = accumulation_dtype(b.dtype)
    rule = Rule(lambda rows, *_: (recurrence(rows[1].to(dtype), rows[0].to(dtype)).to(b.dtype), None), packed=False)
    return scan_by_channels(rule, (b, a), (), segments, group)
