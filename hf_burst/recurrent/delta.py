"""Delta rules over shards: gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692).

Each token multiplies the state S, of shape `(K, V)`, by its own matrix and adds to it. A run of tokens therefore gives
`S_out = M S_in + S_own`, and outputs `o = o_own + (q^T M_t) S_in`. One call of the model's own function computes all
four: with K extra columns of zeros in the values, and the identity as the initial state in those columns, it returns
`[o_own, q^T M_t]` and `[S_own, M]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from ..ranks.group import ContextGroup
from .exchange import to_heads, to_tokens
from .pieces import Rule, joined
from .replay import Shards
from .states import LastStates, by_matrix, ends_of, in_full_precision, incoming_states, join_backward


def delta_rule_by_states(
    rule: Rule, inputs: Sequence[Tensor], shards: Shards, last: LastStates | None = None
) -> Tensor:
    """Applies a delta rule to each document separately; states pass from rank to rank.

    Args:
        rule ([`Rule`]): The delta rule, with states `(K, V)`, in fp32 inside.
        inputs (five `torch.Tensor`): Queries and keys of shape `(batch, n, key heads, K)`, values `(batch, n, value
            heads, V)`, logarithms of the decay `(batch, n, value heads)` or `(batch, n, value heads, K)`, and beta
            `(batch, n, value heads)`, of this rank's tokens.
        shards ([`Shards`]): The parts of the sequences. All ranks call it at the same time.
        last ([`LastStates`], *optional*): Collects the final states of rows.

    Returns:
        `torch.Tensor` of shape `(batch, n, value heads, V)`.
    """
    last = last or LastStates((), shards.group)
    wanted = last.own
    value, keys = inputs[2], inputs[1].shape[-1]
    segments, own, (heads, width) = shards.segments, shards.own, value.shape[2:]
    if not segments.slots:
        out, lasts = rule(segments, joined(inputs, own), [piece.size for piece in own], ends=bool(wanted))
        last.states |= {index: lasts[index] for index in wanted}
        return out.view(value.shape)
    zeros = value.new_zeros(heads, keys, width, dtype=accumulation_dtype(value.dtype))
    identity = torch.eye(keys, dtype=zeros.dtype, device=zeros.device).expand(heads, -1, -1)
    begin, nothing = torch.cat([zeros, identity], dim=-1), zeros.new_zeros(heads, keys, keys)
    outputs, handed = dict[int, Tensor](), dict[int, tuple[Tensor, Tensor]]()
    ending = shards.exports | wanted
    opening = [index for index, piece in enumerate(own) if piece.opens]
    later = [index for index, piece in enumerate(own) if not piece.opens]
    alone, begun = ([index for index in opening if (index in ending) == ends] for ends in (False, True))
    for places, ends in ((alone, False), (begun, True), (later, True)):
        if not places:
            continue
        sizes, rows = [own[index].size for index in places], joined(inputs, [own[index] for index in places])
        if places is later:
            rows[2] = torch.cat([rows[2], rows[2].new_zeros(*rows[2].shape[:2], keys)], dim=-1)
        out, lasts = rule(segments, rows, sizes, begin if places is later else None, ends)
        outputs |= dict(zip(places, out.split(sizes), strict=True))
        for index, end in zip(places, lasts, strict=ends):
            transition = end[..., width:] if places is later else nothing  # opening segments have no incoming state
            handed[index] = end[..., :width].to(zeros.dtype), transition.to(zeros.dtype)
    with in_full_precision(value):
        incoming, slots = incoming_states(handed, by_matrix, shards)
        for index, state in incoming.items():
            out, read = outputs[index].split([width, keys], dim=-1)
            outputs[index] = out + torch.einsum("nhk,hkv->nhv", read, state.to(read.dtype))
        last.states |= ends_of(handed, incoming, by_matrix, wanted)
    return join_backward(torch.cat([outputs[index] for index in range(len(own))]).view(value.shape), slots)


def delta_rule_by_heads(rule: Rule, inputs: Sequence[Tensor], shards: Shards) -> Tensor:
    """Does as [`delta_rule_by_states`] by exchanging heads: every rank gets whole sequences of some heads."""
    out = delta_rule_by_states(rule, to_heads(inputs, shards), Shards(shards.segments.whole, ContextGroup()))
    return to_tokens(out, inputs[2].shape[2], shards)
