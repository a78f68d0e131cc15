"""Delta rules over shards: gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692).

A token multiplies the state S, of shape `(K, V)`, by a matrix of its own and adds to it, so that a run of tokens does
`S_out = M S_in + S_own`, and its outputs are `o = o_own + (q^T M_t) S_in`. One call of the model's own function finds
all four: with K further columns in the values, which are zeros, and the identity as the state in those columns, it
returns `[o_own, q^T M_t]` and `[S_own, M]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mesh import ContextGroup
from ..plan import Segments
from .exchange import to_heads, to_tokens, whole_segments
from .gather import take_part
from .pieces import Rule, cut, wide
from .received import Received
from .states import by_matrix, in_full_precision, incoming_states


def delta_rule_by_states(
    rule: Rule, inputs: Sequence[Tensor], segments: Segments, group: ContextGroup, received: Received | None = None
) -> Tensor:
    """A delta rule of each document by itself; states pass from rank to rank.

    Args:
        rule ([`Rule`]): The delta rule, of states `(K, V)`, in fp32 inside.
        inputs (five `torch.Tensor`): Queries and keys of shape `(batch, n, key heads, K)`, values `(batch, n, value
            heads, V)`, logarithms of the decay `(batch, n, value heads)` or `(batch, n, value heads, K)`, and beta
            `(batch, n, value heads)`, of this rank's tokens.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        `torch.Tensor` of shape `(batch, n, value heads, V)`.
    """
    value, keys = inputs[2], inputs[1].shape[-1]
    batch, tokens, heads, width = value.shape
    own = segments.by_rank[group.rank]
    pieces, zeros = cut(inputs, own), value.new_zeros(heads, keys, width, dtype=wide(value))
    identity = torch.eye(keys, dtype=zeros.dtype, device=zeros.device).expand(heads, -1, -1)
    opens, later = ([index for index, piece in enumerate(own) if piece.opens == first] for first in (True, False))
    results: dict[int, tuple[Tensor, Tensor]] = {}
    if opens:
        outs, ends = rule([pieces[index] for index in opens], [zeros] * len(opens))
        results |= dict(zip(opens, zip(outs, ends, strict=True), strict=True))
    if later:
        begin = torch.cat([zeros, identity], dim=-1)
        outs, ends = rule([_with_columns(pieces[index], keys) for index in later], [begin] * len(later))
        results |= dict(zip(later, zip(outs, ends, strict=True), strict=True))
    lasts = [results[index][1].to(zeros.dtype) for index in range(len(own))]
    states = [last[..., :width] for last in lasts]
    passed_on = zeros.new_zeros(heads, keys, keys)  # of a segment that opens a document: nothing comes in
    transitions = [passed_on if piece.opens else lasts[index][..., width:] for index, piece in enumerate(own)]
    outputs = []
    with in_full_precision(value):
        incoming, slots = incoming_states(states, transitions, by_matrix, segments, group, received)
        for index, state in enumerate(incoming):
            out = results[index][0]
            if state is not None:
                read = torch.einsum("nhk,hkv->nhv", out[..., width:].to(state.dtype), state)
                out = out[..., :width] + read.to(out.dtype)
            outputs.append(out)
    return take_part(torch.cat(outputs).view(batch, tokens, heads, width), slots)


def delta_rule_by_heads(rule: Rule, inputs: Sequence[Tensor], segments: Segments, group: ContextGroup) -> Tensor:
    """The same by an exchange: every rank has whole sequences of some of the heads. See [`delta_rule_by_states`]."""
    query, key, value, decay, beta = inputs
    repeats = value.shape[2] // key.shape[2]
    if key.shape[2] % group.size:  # a rank has value heads whose keys are another's
        query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
    spread = [to_heads(tensor, segments, group) for tensor in (query, key, value, decay, beta)]
    out = delta_rule_by_states(rule, spread, whole_segments(segments), ContextGroup())
    return to_tokens(out, value.shape[2], segments, group)


def _with_columns(piece: Sequence[Tensor], columns: int) -> list[Tensor]:
    """The tensors of a piece, so many zeros appended to each value."""
    query, key, value, decay, beta = piece
    return [query, key, torch.cat([value, value.new_zeros(*value.shape[:2], columns)], dim=-1), decay, beta]
