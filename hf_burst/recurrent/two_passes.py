"""A gated delta rule over shards in two passes: first how pieces transform a state, then outputs from incoming states.

The first pass reads only keys and values. Ranks exchange its results, and the second pass starts every piece from its
true state. The backward pass has the same structure: gradients of the initial states as if nothing followed the pieces,
the exchange, then all gradients.

    inputs -> [_Maps] -> states, transitions -> exchange -> incoming states -> [_Outputs] -> outputs

Gradients of inputs need the gradients of the pieces' final states, which arrive last. So `_Outputs` returns only the
gradients of incoming states, and leaves the rest to `_Maps`, whose backward pass runs after the exchange. Transitions
need no gradients, because those of the final states are complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..numerics import refuse_second_derivative
from ..plan import Segments
from ..ranks.group import ContextGroup
from .pieces import Rule, joined, made_once
from .replay import Shards
from .states import by_matrix, in_full_precision, incoming_states, join_backward

Opaque = tuple[Tensor, ...]  # tensors that kernels hand to themselves


class Inputs(NamedTuple):
    """Queries and keys `(tokens, key heads, K)`, values `(tokens, heads, V)`, logarithms of the decay and beta
    `(tokens, heads)`, for concatenated pieces."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Passing(NamedTuple):
    """The pieces of a rank that receive or send a state. Made once per batch."""

    places: tuple[int, ...]  # indices of the pieces among the rank's segments
    laid: Any  # the result of [`DeltaKernels.lay`] for their bounds


class DeltaKernels(Protocol):
    """The kernels of a gated delta rule. `laid`, `prepared` and `begun` are opaque to callers. Some kernels scale the
    queries themselves. Layers whose kernels compare equal share `laid`."""

    kept: int  # the first tensors of `prepared`, which the backward pass needs

    def lay(self, bounds: Sequence[int], device: torch.device) -> Any:
        """Puts the kernels' arguments for pieces with these cumulative bounds, in tokens, on a device."""

    def prepare(self, inputs: Inputs, passing: Passing) -> Opaque:
        """Computes the part inside chunks, which needs no state."""

    def maps(self, inputs: Inputs, prepared: Opaque, passing: Passing) -> tuple[Tensor, Tensor]:
        """Returns the final states of pieces that start from zeros, `(pieces, heads, K, V)`, and the pieces'
        transitions, `(pieces, heads, K, K)`, both in fp32 or fp64."""

    def outputs(self, inputs: Inputs, prepared: Opaque, begin: Tensor, passing: Passing) -> Tensor:
        """Returns the outputs `(tokens, heads, V)` of pieces that start from these states."""

    def begin_backward(
        self, inputs: Inputs, kept: Opaque, begin: Tensor, dout: Tensor, passing: Passing
    ) -> tuple[Tensor, Opaque]:
        """Returns the gradients of the pieces' initial states as if nothing followed the pieces, and `begun`."""

    def end_backward(self, inputs: Inputs, begun: Opaque, dend: Tensor, passing: Passing) -> Inputs:
        """Returns the gradients of the inputs, given those of the pieces' final states."""


def delta_rule_in_two_passes(rule: Rule, kernels: DeltaKernels, inputs: Sequence[Tensor], shards: Shards) -> Tensor:
    """Applies a gated delta rule to each document separately; states pass from rank to rank.

    Args:
        rule ([`Rule`]): The rule, for documents on a single rank.
        kernels ([`DeltaKernels`]): The rule's kernels.
        inputs (five `torch.Tensor`): As in [`delta_rule_by_states`], with one decay per head.
        shards ([`Shards`]): The parts of the sequences. All ranks call it at the same time.

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


@dataclass
class _Turn:
    """Values passed between the two autograd functions of one call, briefly in each pass."""

    kernels: DeltaKernels
    passing: Passing
    forward: tuple[Any, ...] = ()  # the inputs and `prepared`
    backward: tuple[Any, ...] = ()  # the inputs and `begun`


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
        (inputs, begun), ctx.turn.backward = ctx.turn.backward, ()
        return None, *ctx.turn.kernels.end_backward(inputs, begun, gradients[0].contiguous(), ctx.turn.passing)


class _Outputs(torch.autograd.Function):
    """`after` is an empty tensor that makes the backward pass of [`_Maps`] run after this one's."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, after: Tensor, begin: Tensor) -> Tensor:
        (inputs, prepared), turn.forward = turn.forward, ()
        ctx.turn = turn
        ctx.save_for_backward(*inputs, begin, *prepared[: turn.kernels.kept])
        return turn.kernels.outputs(inputs, prepared, begin, turn.passing)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        turn, saved = ctx.turn, ctx.saved_tensors  # read only once, as a checkpoint returns them once
        inputs, begin, kept = Inputs(*saved[:5]), saved[5], saved[6:]
        dbegin, begun = turn.kernels.begin_backward(inputs, kept, begin, dout.contiguous(), turn.passing)
        turn.backward = inputs, begun
        return None, dbegin.new_empty(0), dbegin
