"""States that pass from segment to segment of a document.

A text may go on in several ways: then all of them begin with the state that it leaves, whose gradients are summed.

What a run of tokens does to a state is affine: it comes out as `advance(transition, state) + own`. Transitions compose,
so that every rank finds the states that come to its segments from what all segments hand on.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .gather import gather_slots
from .replay import Shards


def incoming_states(
    handed: Mapping[int, tuple[Tensor, Tensor]],
    advance: Callable[[Tensor, Tensor], Tensor],
    shards: Shards,
    constant: bool = False,
) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
    """The states that come to the segments of this rank which open no document; and the slots that were gathered, for
    [`join_backward`]. Every rank calls it at the same time.

    Args:
        handed (mapping from `int` to two `torch.Tensor`, fp32): For each segment of [`Shards.exports`], its state at
            the end if it begins with zeros, and what it does to the state that comes in; of one that opens a document,
            anything.
        advance (callable): Applies a transition to a state.
        constant (`bool`, defaults to `False`): Whether transitions take no gradients, which then do not travel.
    """
    own, transition = next(iter(handed.values()))
    incoming = dict[int, Tensor]()
    if constant:
        slots, steps = (
            gather_slots({index: pair[place] for index, pair in handed.items()}, shards) for place in range(2)
        )
        pairs = {piece: (slot, steps[piece]) for piece, slot in slots.items()}
    else:
        flat = {index: torch.cat([tensor.flatten() for tensor in pair]) for index, pair in handed.items()}
        slots = gather_slots(flat, shards)
        pairs = {piece: slot.split([own.numel(), transition.numel()]) for piece, slot in slots.items()}
    before, after = shards.segments.before, dict[tuple[int, int], Tensor]()  # the state behind each segment
    for index in range(len(shards.own)):
        piece, ahead = before.get((shards.group.rank, index)), list[tuple[int, int]]()
        while piece is not None and piece not in after:
            ahead.append(piece)
            piece = before.get(piece)
        state = None if piece is None else after[piece]
        for piece in reversed(ahead):
            added, step = pairs[piece]
            added = added.view(own.shape)
            state = added if state is None else advance(step.view(transition.shape), state) + added
            after[piece] = state
        if state is not None:
            incoming[index] = state
    return incoming, tuple(slots.values())


def ends_of(
    handed: Mapping[int, tuple[Tensor, Tensor]],
    incoming: Mapping[int, Tensor],
    advance: Callable[[Tensor, Tensor], Tensor],
    places: Iterable[int],
) -> dict[int, Tensor]:
    """The states at the end of some segments, from what they hand on and the states that come to them."""
    found = {}
    for index in places:
        own, transition = handed[index]
        found[index] = own if index not in incoming else advance(transition, incoming[index]) + own
    return found


def in_full_precision(tensor: Tensor) -> torch.autocast:
    """A context in which products of states keep their dtype, also under autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def by_matrix(transition: Tensor, state: Tensor) -> Tensor:
    """`(heads, K, K)` times `(heads, K, V)`. TF32 would lose what many transitions in a row add up to, so that they
    compose in fp64, whatever torch is told."""
    return (transition.double() @ state.double()).to(state.dtype)


def by_number(transition: Tensor, state: Tensor) -> Tensor:
    """One number for each head: `(heads,)` times `(heads, ...)`."""
    return transition.view(-1, *[1] * (state.ndim - 1)) * state
