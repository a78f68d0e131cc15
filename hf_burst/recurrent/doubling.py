"""States that come to segments in as many steps as the logarithm of the longest chain of them.

In each step a segment tells what it knows to one behind it, twice as far as before (Hillis and Steele 1986). It
knows what a run of segments up to itself does to a state; once the run begins with the document, the state itself. The
backward pass is such a scan from the end. If `s' = A s + b`, and G' is the whole gradient of s', that of s is
`G = A^T G' + g` with what outputs add, that of b is G', and that of A is `G' s^T`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..numerics import refuse_second_derivative
from ..plan import Hop, Segments
from ..plan.traffic import Pass
from ..ranks.group import ContextGroup
from .gather import handing_on
from .received import Received

Known = tuple[Tensor, ...]  # a state, and a transition unless all segments before are known


@dataclass(frozen=True)
class Scan:
    """The part of one rank in a scan.

    Args:
        advance (callable): Applies a transition to a state, or to an earlier transition.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
    """

    advance: Callable[[Tensor, Tensor], Tensor]
    segments: Segments
    group: ContextGroup

    def incoming(self, handed: Mapping[int, Known], received: Received) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
        """The states that come to the segments of this rank; arguments and results as in [`incoming_states`]."""
        states, transitions = map(torch.stack, zip(*(handed[index] for index in self.handing), strict=True))
        came = received.exchange(states, lambda kept: (_Incoming.apply(states, transitions, self, kept and kept[0]),))
        return dict(zip(self.later, came[0].unbind(), strict=True)), came

    @property
    def handing(self) -> list[int]:
        """The segments of this rank that hand something on, see [`handing_on`]."""
        return sorted(handing_on(self.segments, self.group))

    @property
    def later(self) -> list[int]:
        """The segments of this rank to which a state comes."""
        return [index for index, piece in enumerate(self.segments.by_rank[self.group.rank]) if not piece.opens]

    def run(self, own: Mapping[int, Known], like: Known, direction: Pass) -> dict[int, Tensor]:
        """The states that come to segments in a pass, of what each of them does itself. `like` are a state and a
        transition. All ranks send as often, possibly nothing."""
        known, before = dict(own), dict[int, Known]()
        for leaving, coming in self.segments.once(_steps_of, self.group.rank, direction):
            for hop in leaving:
                index = hop.source[1]
                if index not in known:
                    known[index] = self.composed(own[index], before[index])
            parts = [part.flatten() for hop in leaving for part in known[hop.source[1]][: hop.tensors]]
            outgoing = torch.cat(parts) if parts else like[0].new_empty(0)
            to, since = self._sizes(leaving, "target", like), self._sizes(coming, "source", like)
            landing = outgoing.new_empty(sum(since))
            dist.all_to_all_single(landing, outgoing, since, to, group=self.group.process_group)
            shapes = [tensor.shape for hop in coming for tensor in like[: hop.tensors]]
            pieces = landing.split([shape.numel() for shape in shapes])
            landed = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
            for hop in coming:
                index, run = hop.target[1], tuple(islice(landed, hop.tensors))
                before[index] = self.composed(before[index], run) if index in before else run
                known.pop(index, None)
        return {index: state for index, (state, *_) in before.items()}

    def composed(self, after: Known, first: Known) -> Known:
        """What two runs do, one after another."""
        state, transition = after
        return self.advance(transition, first[0]) + state, *(self.advance(transition, past) for past in first[1:])

    def _sizes(self, hops: tuple[Hop, ...], end: str, like: Known) -> list[int]:
        """How many numbers go to, or come from, each rank."""
        sizes = [0] * self.group.size
        for hop in hops:
            sizes[getattr(hop, end)[0]] += sum(tensor.numel() for tensor in like[: hop.tensors])
        return sizes


class _Incoming(torch.autograd.Function):
    """From what the segments of this rank hand on, to the states that come to those that open no document."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, transitions: Tensor, scan: Scan, kept: Tensor | None) -> Tensor:
        ctx.scan, incoming = scan, kept
        if incoming is None:
            own = dict(zip(scan.handing, zip(states, transitions, strict=True), strict=True))
            before = scan.run(own, (states[0], transitions[0]), "forward")
            came = [before[index] for index in scan.later]
            incoming = torch.stack(came) if came else states.new_empty(0, *states.shape[1:])
        ctx.save_for_backward(transitions, incoming)
        return incoming.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        refuse_second_derivative()
        transitions, incoming = ctx.saved_tensors
        handing, later = ctx.scan.handing, ctx.scan.later
        steps = dict(zip(handing, _transposed(transitions), strict=True))
        came, own = (dict(zip(later, tensor, strict=True)) for tensor in (incoming, gradient))
        back = {index: (own[index], steps[index]) if index in steps else (own[index],) for index in later}
        nothing = incoming.new_zeros(incoming.shape[1:])  # of a rank that hands on to nobody, or opens a document
        behind = ctx.scan.run(back, (nothing, _transposed(transitions)[0]), "backward")
        states = torch.stack([behind.get(index, nothing) for index in handing])
        before = torch.stack([came.get(index, nothing) for index in handing])
        outer = _outer(states, before, transitions) if ctx.needs_input_grad[1] else None
        return states, outer, None, None


def _steps_of(segments: Segments, rank: int, direction: Pass) -> list[tuple[tuple[Hop, ...], ...]]:
    """What leaves a rank in each step, by where it goes, and what comes, by where it comes from."""
    return [
        (
            tuple(sorted((hop for hop in step if hop.source[0] == rank), key=lambda hop: hop.target[0])),
            tuple(sorted((hop for hop in step if hop.target[0] == rank), key=lambda hop: hop.source[0])),
        )
        for step in segments.hops[direction]
    ]


def _transposed(transitions: Tensor) -> Tensor:
    """Of a matrix for each head; a number for each head is as it was."""
    return transitions.mT if transitions.ndim > 2 else transitions


def _outer(gradients: Tensor, states: Tensor, transitions: Tensor) -> Tensor:
    """The gradients of transitions, in fp64 as these compose."""
    gradients, states = gradients.double(), states.double()
    matrices = transitions.ndim > 2
    product = gradients @ states.mT if matrices else (gradients * states).reshape(*transitions.shape, -1).sum(-1)
    return product.to(transitions.dtype)
