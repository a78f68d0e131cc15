"""A gated delta rule over shards in two passes: what pieces do to a state, then outputs by the states that come.

The first pass goes over keys and values alone. Ranks exchange what it finds, and the second pass begins every piece
with its true state. The backward pass is built likewise: gradients of states that nothing follows, the exchange, then
all gradients.

    inputs -> [_Maps] -> states, transitions -> exchange -> states that come -> [_Outputs] -> outputs

Gradients of inputs need those of the states at the end of pieces, which come last. So `_Outputs` returns gradients of
the states that come, and leaves the rest to `_Maps`, whose backward pass runs after the exchange. Transitions take no
gradients: those of the states at the end are whole.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..numerics import refuse_second_derivative
from ..plan import Segments
from ..ranks.group import ContextGroup
from .gather import join_backward
from .once import made_once
from .pieces import Rule, joined
from .replay import Shards
from .states import by_matrix, in_full_precision, incoming_states


class Inputs(NamedTuple):
    """Queries and keys `(tokens, key heads, K)`, values `(tokens, heads, V)`, logarithms of the decay and beta
    `(tokens, heads)`, of pieces one after another."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Passing(NamedTuple):
    """The pieces of a rank whose state passes. Made once for a batch."""

    places: tuple[int, ...]  # their places among the segments of the rank
    laid: Any  # what [`DeltaKernels.lay`] makes of their bounds


class DeltaKernels(Protocol):
    """The steps of a gated delta rule, of whose queries some scale. What is `laid`, `prepared` and `begun` they alone
    know. What is laid is kept for the next layer, if its kernels compare as equal."""

    def lay(self, bounds: Sequence[int], device: torch.device) -> Any:
        """What steps have to know of where pieces begin: their cumulative bounds, in tokens, on a device."""

    def prepare(self, inputs: Inputs, passing: Passing) -> tuple[Tensor, ...]:
        """What is computed inside of chunks, without any state."""

    def maps(self, inputs: Inputs, prepared: tuple[Tensor, ...], passing: Passing) -> tuple[Tensor, Tensor]:
        """The states at the end of pieces that begin with zeros, `(pieces, heads, K, V)`, and what these do to a state
        that comes, `(pieces, heads, K, K)`. Both in fp32 or fp64."""

    def outputs(self, inputs: Inputs, prepared: tuple[Tensor, ...], begin: Tensor, passing: Passing) -> Tensor:
        """The outputs `(tokens, heads, V)` of pieces that begin with these states."""

    def kept(self, prepared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What of it the backward pass takes."""

    def begin_backward(
        self, inputs: Inputs, kept: tuple[Tensor, ...], begin: Tensor, dout: Tensor, passing: Passing
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of the states at the beginning of pieces if nothing follows them, and what is begun."""

    def end_backward(self, inputs: Inputs, begun: tuple[Tensor, ...], dend: Tensor, passing: Passing) -> Inputs:
        """The gradients of the inputs, by those of the states at the end of pieces."""


def delta_rule_in_two_passes(rule: Rule, kernels: DeltaKernels, inputs: Sequence[Tensor], shards: Shards) -> Tensor:
    """A gated delta rule of each document by itself; states pass from rank to rank.

    Args:
        rule ([`Rule`]): The rule, for documents that one rank holds.
        kernels ([`DeltaKernels`]): Its steps.
        inputs (five `torch.Tensor`): As in [`delta_rule_by_states`], with one decay for each head.
        shards ([`Shards`]): The parts of the sequences. Every rank calls it at the same time.

    Returns:
        `torch.Tensor` of shape `(batch, n, value heads, V)`.
    """
    value, segments, own = inputs[2], shards.segments, shards.own
    if not segments.slots:
        return rule(segments, joined(inputs, own), [piece.size for piece in own])[0].view(value.shape)
    passing = made_once(segments, _passing, value.device, shards.group, kernels)
    with in_full_precision(value), torch.cuda.device_of(value):
        turn = _Turn(kernels, passing)
        states, transitions, after = _Maps.apply(turn, *joined(inputs, [own[place] for place in passing.places]))
        handed = dict(zip(passing.places, zip(states.unbind(), transitions.unbind(), strict=True), strict=True))
        incoming, slots = incoming_states(handed, by_matrix, shards, constant=True)
        nothing = torch.zeros_like(transitions[0, ..., :1]).expand(states.shape[1:])
        out = _Outputs.apply(turn, after, torch.stack([incoming.get(place, nothing) for place in passing.places]))
    alone = [place for place in range(len(own)) if place not in passing.places]
    if alone:
        sizes = [own[place].size for place in alone]
        local, _ = rule(segments, joined(inputs, [own[place] for place in alone]), sizes)
        outputs = dict(zip(alone, local.split(sizes), strict=True))
        outputs |= dict(zip(passing.places, out.split([own[place].size for place in passing.places]), strict=True))
        out = torch.cat([outputs[place] for place in range(len(own))])
    return join_backward(out.view(value.shape), slots)


def _passing(segments: Segments, device: torch.device, group: ContextGroup, kernels: DeltaKernels) -> Passing:
    own, sending = segments.by_rank[group.rank], Shards(segments, group).exports
    places = tuple(place for place, piece in enumerate(own) if place in sending or not piece.opens)
    return Passing(places, kernels.lay([0, *accumulate(own[place].size for place in places)], device))


class _Turn:
    """What both functions of one call share, for a moment in either pass."""

    def __init__(self, kernels: DeltaKernels, passing: Passing) -> None:
        self.kernels, self.passing = kernels, passing
        self.forward: tuple[Any, ...] = ()  # the inputs, and what is prepared
        self.backward: tuple[Any, ...] = ()  # the inputs, and what is begun


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: _Turn, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = Inputs(*(row.contiguous() for row in rows))
        prepared = turn.kernels.prepare(inputs, turn.passing)
        states, transitions = turn.kernels.maps(inputs, prepared, turn.passing)
        turn.forward, ctx.turn = (inputs, prepared), turn
        ctx.mark_non_differentiable(transitions)
        return states, transitions, states.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        turn: _Turn = ctx.turn
        (inputs, begun), turn.backward = turn.backward, ()
        return None, *turn.kernels.end_backward(inputs, begun, gradients[0].contiguous(), turn.passing)


class _Outputs(torch.autograd.Function):
    """`after` is a tensor without elements, by which [`_Maps`] is behind in the backward pass."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, after: Tensor, begin: Tensor) -> Tensor:
        (inputs, prepared), turn.forward = turn.forward, ()
        ctx.turn = turn
        ctx.save_for_backward(*inputs, begin, *turn.kernels.kept(prepared))
        return turn.kernels.outputs(inputs, prepared, begin, turn.passing)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        turn, saved = ctx.turn, ctx.saved_tensors  # asked for once: a checkpoint hands them out once
        inputs, begin, kept = Inputs(*saved[:5]), saved[5], saved[6:]
        dbegin, begun = turn.kernels.begin_backward(inputs, kept, begin, dout.contiguous(), turn.passing)
        turn.backward = inputs, begun
        return None, dbegin.new_empty(0), dbegin
