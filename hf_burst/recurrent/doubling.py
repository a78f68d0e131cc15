"""States that come to segments in as many steps as the logarithm of the longest chain of them.

In each step a segment tells what it knows to one behind it, twice as far as before (Hillis and Steele 1986). It
knows what a run of segments up to itself does to a state; once the run begins with the document, the state itself. The
backward pass is such a scan from the end. If `s' = A s + b`, and G' is the whole gradient of s', that of s is
`G = A^T G' + g` with what outputs add, that of b is G', and that of A is `G' s^T`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import refuse_second_derivative
from ..mesh import ContextGroup
from ..plan import Hop, Segments
from ..plan.traffic import Pass
from .gather import handing_on
from .received import Received

Advance = Callable[[Tensor, Tensor], Tensor]
Known = tuple[Tensor, ...]  # a state, and a transition unless all segments before are known
Steps = tuple[tuple[tuple[Hop, ...], tuple[Hop, ...]], ...]  # what leaves a rank, and what comes, by peers


def scan_states(
    handed: Mapping[int, tuple[Tensor, Tensor]],
    advance: Advance,
    segments: Segments,
    group: ContextGroup,
    received: Received,
) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
    """The states that come to the segments of this rank; arguments and results as in [`incoming_states`]."""
    pairs = zip(*(handed[index] for index in sorted(handing_on(segments, group))), strict=True)
    states, transitions = map(torch.stack, pairs)
    came = received.exchange(
        states, lambda kept: (_Scan.apply(states, transitions, advance, segments, group, kept and kept[0]),)
    )
    return dict(zip(_later(segments, group), came[0].unbind(), strict=True)), came


class _Scan(torch.autograd.Function):
    """From what the segments of this rank hand on, to the states that come to those that open no document."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        transitions: Tensor,
        advance: Advance,
        segments: Segments,
        group: ContextGroup,
        kept: Tensor | None,
    ) -> Tensor:
        ctx.settings = advance, segments, group
        own = dict(zip(sorted(handing_on(segments, group)), zip(states, transitions, strict=True), strict=True))
        if kept is None:
            before = _scan(own, (states[0], transitions[0]), "forward", *ctx.settings)
            came = [before[index] for index in _later(segments, group)]
            incoming = torch.stack(came) if came else states.new_empty(0, *states.shape[1:])
        else:
            incoming = kept.detach()
        ctx.save_for_backward(transitions, incoming)
        return incoming

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (transitions, incoming), (_, segments, group) = ctx.saved_tensors, ctx.settings
        handing, later = sorted(handing_on(segments, group)), _later(segments, group)
        steps = dict(zip(handing, transitions, strict=True))
        came, own = (dict(zip(later, tensor, strict=True)) for tensor in (incoming, gradient))
        back: dict[int, Known] = {index: (added,) for index, added in own.items()}
        back |= {index: (own[index], _transposed(steps[index])) for index in later if index in steps}
        like = incoming.new_empty(incoming.shape[1:]), _transposed(transitions[0])
        behind = _scan(back, like, "backward", *ctx.settings)
        nothing = incoming.new_zeros(incoming.shape[1:])  # of a rank that hands on to nobody
        states = torch.stack([behind.get(index, nothing) for index in handing])
        before = torch.stack([came.get(index, nothing) for index in handing])
        return states, _outer(states, before, transitions), None, None, None, None


def _scan(
    own: Mapping[int, Known],
    like: tuple[Tensor, Tensor],
    direction: Pass,
    advance: Advance,
    segments: Segments,
    group: ContextGroup,
) -> dict[int, Tensor]:
    """The states that come to segments in a pass, of what each of them does itself. `like` is a state and a transition.
    All ranks send as often, possibly nothing."""
    known, before = dict(own), dict[int, Known]()
    for leaving, coming in segments.once(_steps_of, group.rank, direction):
        for hop in leaving:
            index = hop.source[1]
            if index not in known:
                known[index] = _composed(own[index], before[index], advance)
        parts = [part for hop in leaving for part in known[hop.source[1]][: 1 if hop.complete else 2]]
        for hop, landed in zip(coming, _exchanged(parts, leaving, coming, like, group), strict=True):
            index = hop.target[1]
            before[index] = _composed(before[index], landed, advance) if index in before else landed
            known.pop(index, None)
    return {index: state for index, (state, *_) in before.items()}


def _composed(after: Known, first: Known, advance: Advance) -> Known:
    """What two runs do, one after another."""
    state, transition = after
    return advance(transition, first[0]) + state, *(advance(transition, past) for past in first[1:])


def _exchanged(
    parts: list[Tensor],
    leaving: tuple[Hop, ...],
    coming: tuple[Hop, ...],
    like: tuple[Tensor, Tensor],
    group: ContextGroup,
) -> list[Known]:
    """The states and transitions that come in one step, in the sequence of `coming`."""
    sizes = [tensor.numel() for tensor in like]
    counts = [[0] * group.size, [0] * group.size]
    for hop in leaving:
        counts[0][hop.target[0]] += sizes[0] if hop.complete else sum(sizes)
    for hop in coming:
        counts[1][hop.source[0]] += sizes[0] if hop.complete else sum(sizes)
    outgoing = torch.cat([like[0].new_empty(0), *(part.flatten() for part in parts)])
    landing = outgoing.new_empty(sum(counts[1]))
    dist.all_to_all_single(landing, outgoing, counts[1], counts[0], group=group.process_group)
    shapes = [like[:1] if hop.complete else like for hop in coming]
    pieces = iter(landing.split([tensor.numel() for shape in shapes for tensor in shape]))
    return [tuple(next(pieces).view(tensor.shape) for tensor in shape) for shape in shapes]


def _steps_of(segments: Segments, rank: int, direction: Pass) -> Steps:
    """The hops that leave a rank, by their targets, and those that come, by their sources."""
    return tuple(
        (
            tuple(sorted((hop for hop in step if hop.source[0] == rank), key=lambda hop: hop.target[0])),
            tuple(sorted((hop for hop in step if hop.target[0] == rank), key=lambda hop: hop.source[0])),
        )
        for step in segments.hops[direction]
    )


def _later(segments: Segments, group: ContextGroup) -> list[int]:
    """The segments of this rank to which a state comes."""
    return [index for index, piece in enumerate(segments.by_rank[group.rank]) if not piece.opens]


def _transposed(transition: Tensor) -> Tensor:
    """Of the matrix of each head; a number of each head is as it was."""
    return transition.mT if transition.ndim > 1 else transition


def _outer(gradients: Tensor, states: Tensor, transitions: Tensor) -> Tensor:
    """The gradients of transitions, in fp64 as these compose."""
    gradients, states = gradients.double(), states.double()
    matrices = transitions.ndim > 2
    product = gradients @ states.mT if matrices else (gradients * states).reshape(*transitions.shape, -1).sum(-1)
    return product.to(transitions.dtype)
