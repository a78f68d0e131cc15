"""States that pass from segment to segment of a document.

What a run of tokens does to a state is affine: it comes out as `advance(transition, state) + own`. Transitions compose,
so that every rank finds the states that come to its segments from what all segments hand on.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..mesh import ContextGroup
from ..plan import Segments
from .gather import Slots, gather_slots
from .received import Received


def incoming_states(
    own: Sequence[Tensor],
    transitions: Sequence[Tensor],
    advance: Callable[[Tensor, Tensor], Tensor],
    segments: Segments,
    group: ContextGroup,
    received: Received | None = None,
) -> tuple[list[Tensor | None], Slots]:
    """The states that come to the segments of this rank.

    Args:
        own (sequence of `torch.Tensor` of one shape, fp32): For each segment of this rank, its state at the end if it
            begins with zeros.
        transitions (sequence of `torch.Tensor` of one shape, fp32): What each does to the state that comes in; of those
            that open a document, anything.
        advance (callable): Applies a transition to a state.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        For each segment of this rank its state at the beginning, `None` for zeros; and the slots, for [`take_part`].
    """
    if not segments.most_slots:
        return [None] * len(own), {}
    found: dict[tuple[int, int], Tensor] = {}
    shape, size = own[0].shape, own[0].numel()
    flat = [torch.cat([state.flatten(), step.flatten()]) for state, step in zip(own, transitions, strict=True)]
    slots = gather_slots(flat, segments, group, received)
    for chain in segments.chains:
        last = max((place for place, (rank, _) in enumerate(chain) if rank == group.rank), default=0)
        state = None
        for piece in chain[: last + 1]:
            if state is not None:
                found[piece] = state
            if piece not in slots:
                break
            added, step = slots[piece][:size].view(shape), slots[piece][size:].view(transitions[0].shape)
            state = added if state is None else advance(step, state) + added
    return [found.get((group.rank, index)) for index in range(len(own))], slots


def in_full_precision(tensor: Tensor) -> torch.autocast:
    """A context in which products of states keep their dtype, also under autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def by_matrix(transition: Tensor, state: Tensor) -> Tensor:
    """`(heads, K, K)` times `(heads, K, V)`, in full precision of the dtype."""
    return transition @ state


def by_number(transition: Tensor, state: Tensor) -> Tensor:
    """One number for each head: `(heads,)` times `(heads, ...)`."""
    return transition.view(-1, *[1] * (state.ndim - 1)) * state
