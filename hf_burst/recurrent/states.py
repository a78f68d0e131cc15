"""States that pass from segment to segment of a document.

A text may have several continuations. Then all of them start from its final state, and their gradients are summed.

A run of tokens maps a state affinely to `advance(transition, state) + own`. Transitions compose, so every rank computes
the incoming states of its segments from all segments' exports.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..plan import Segments
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup
from .replay import Shards

Slots = dict[tuple[int, int], Tensor]  # by the segment's rank and index there


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


@dataclass
class LastStates:
    """Collects the final states of rows, each on the rank that holds the last token.

    Args:
        places (sequence of `tuple[int, int]`): For each row, the rank with its last token, and the segment there.
        group ([`ContextGroup`]): The ranks.
        states (`dict`): The states found by this rank, by segment.
    """

    places: Sequence[tuple[int, int]]
    group: ContextGroup
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Segments, group: ContextGroup, stops: Sequence[int]) -> "LastStates":
        """Makes the collector for rows that end before the tokens `stops`."""
        return cls([segments.holder(row, stop - 1) for row, stop in enumerate(stops)], group)

    @property
    def own(self) -> set[int]:
        """This rank's segments whose final states are needed."""
        return {index for rank, index in self.places if rank == self.group.rank}

    def on_all_ranks(self, like: Tensor) -> Tensor:
        """Gathers all final states, `(rows, ...)`, on every rank. All ranks call it.

        Args:
            like (`torch.Tensor`): A tensor with the shape and dtype of one state.
        """
        mine = like.new_zeros(len(self.places), *like.shape)
        for row, (rank, index) in enumerate(self.places):
            if rank == self.group.rank:
                mine[row] = self.states[index]
        every = all_gather(mine, self.group)
        return torch.stack([every[rank][row] for row, (rank, _) in enumerate(self.places)])
