"""Lightning attention over shards (arXiv 2401.04658): linear attention whose heads forget at a rate of their own.

A token does `S = exp(-s) S + k v^T` to the state of a head, and its output is `q^T S`. That is the scan of Mamba2 with
`A = -s` and steps of 1, so that states compose as there: a run of n tokens does `S_out = exp(-s n) S_in + S_own`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from ..plan import Segments
from ..ranks.group import ContextGroup
from .exchange import own_heads
from .pieces import Rule
from .received import Received
from .scan import scan_by_channels, scan_by_states


def lightning_attention(q: Tensor, k: Tensor, v: Tensor, rates: Tensor, block: int) -> Tensor:
    """Lightning attention of whole sequences in one process.

    Args:
        q, k (`torch.Tensor` of shape `(batch, tokens, heads, K)`): Queries and keys.
        v (`torch.Tensor` of shape `(batch, tokens, heads, V)`): Values.
        rates (`torch.Tensor` of shape `(heads,)`): How fast each head forgets, s above.
        block (`int`): So many tokens are computed as one product.

    Returns:
        `torch.Tensor` of shape `(batch, tokens, heads, V)`.
    """
    rates = rates.to(accumulation_dtype(q.dtype))[:, None]
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for queries, keys, values in zip(*(x.transpose(1, 2).split(block, dim=2) for x in (q, k, v)), strict=True):
        size = queries.shape[2]
        places = torch.arange(1, size + 1, device=q.device)
        apart = places[:, None] - places
        within = (-rates[..., None] * apart).exp().masked_fill(apart < 0, 0).to(q.dtype)
        before, after = ((-rates * tokens).exp()[..., None].to(q.dtype) for tokens in (places, size - places))
        outputs.append(queries @ keys.mT * within @ values + queries * before @ state)
        state = state * (-rates[..., None] * size).exp().to(q.dtype) + (keys * after).mT @ values
    return torch.cat(outputs, dim=2).transpose(1, 2)


def lightning_by_states(
    inputs: Sequence[Tensor],
    rates: Tensor,
    block: int,
    segments: Segments,
    group: ContextGroup,
    received: Received | None = None,
) -> Tensor:
    """Lightning attention of each document by itself; states pass from rank to rank.

    Args:
        inputs (three `torch.Tensor`): q, k and v of this rank's tokens, as [`lightning_attention`] takes them.
        rates, block: As there.
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time.
        received ([`Received`], *optional*): Of a layer that a checkpoint may run again.

    Returns:
        `torch.Tensor` of shape `(batch, n, heads, V)`.
    """
    q, k, v = inputs
    steps = v.new_ones(v.shape[:3], dtype=accumulation_dtype(v.dtype))
    rule = Rule(lambda rows, *_: (lightning_attention(rows[3], rows[2], rows[0], rates, block), None), packed=False)
    return scan_by_states(rule, (v, steps, k, q), steps, -rates.to(steps.dtype), segments, group, received)


def lightning_by_heads(
    inputs: Sequence[Tensor], rates: Tensor, block: int, segments: Segments, group: ContextGroup
) -> Tensor:
    """The same by an exchange: every rank has whole sequences of some of the heads. See [`lightning_by_states`]."""
    q, k, v = inputs
    own = own_heads(rates, group)
    rule = Rule(lambda rows, *_: (lightning_attention(rows[2], rows[1], rows[0], own, block), None), packed=False)
    return scan_by_channels(rule, (v, k, q), (), segments, group)
