"""States that pass from segment to segment of a document.

A text may have several continuations. Then all of them start from its final state, and their gradients are summed.

A run of tokens maps a state affinely to `advance(transition, state) + own`. Transitions compose, so every rank computes
the incoming states of its segments from all segments' exports.
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
    """Returns the incoming states of this rank's segments that do not open a document, and the gathered slots for
    [`join_backward`]. All ranks call it at the same time.

    Args:
        handed (mapping from `int` to two `torch.Tensor`, fp32): For each segment of [`Shards.exports`], its final state
            from a zero initial state, and its transition (any value if it opens a document).
        advance (callable): Applies a transition to a state.
        constant (`bool`, defaults to `False`): Whether transitions need no gradients, which are then not sent.
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
    before, after = shards.segments.before, dict[tuple[int, int], Tensor]()  # the state after each segment
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
    """Returns the final states of some segments, from their exports and incoming states."""
    found = {}
    for index in places:
        own, transition = handed[index]
        found[index] = own if index not in incoming else advance(transition, incoming[index]) + own
    return found


def in_full_precision(tensor: Tensor) -> torch.autocast:
    """Returns a context that disables autocast, so that products of states keep their dtype."""
    return torch.autocast(tensor.device.type, enabled=False)


def by_matrix(transition: Tensor, state: Tensor) -> Tensor:
    """Multiplies `(heads, K, K)` by `(heads, K, V)`, in fp64 whatever torch's settings, because TF32 would lose
    precision over many consecutive transitions."""
    return (transition.double() @ state.double()).to(state.dtype)


def by_number(transition: Tensor, state: Tensor) -> Tensor:
    """Multiplies each head by one number: `(heads,)` times `(heads, ...)`."""
    return transition.view(-1, *[1] * (state.ndim - 1)) * state
