"""The differentiable exchange of heads, for layers that treat each head separately and tokens in order, such as
recurrent ones. Attention exchanges in the same rounds, slice by slice."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError
from ..plan import Sharding
from ..ranks.group import ContextGroup
from ..ring import MAX_TENSORS, HeadsToTokens, TokensToHeads, ulysses_ranks_of
from ..ring.resources import resources_of


def tokens_to_heads(tensors: Sequence[Tensor], sharding: Sharding, group: ContextGroup) -> tuple[Tensor, ...]:
    """Exchanges this rank's tokens of all heads for all tokens of its own heads, for several tensors at once.

    Args:
        tensors (one to six `torch.Tensor` of shape `(batch, n, heads, dim)`): This rank's tokens, for any ownership of
            chunks. The group size must divide the heads. Heads, dimensions and dtypes may differ.
        sharding ([`Sharding`]): Which rank holds which tokens; equal on all ranks.
        group ([`ContextGroup`]): The ranks. All of them call it at the same time, with equal batch and heads.

    Returns:
        `tuple[torch.Tensor, ...]` of shape `(batch, length, heads / ranks, dim)`, in sequence order; rank r has the
        r-th share of the heads. The backward pass is [`heads_to_tokens`].

    Raises:
        ShardingError: If shapes, sharding and group do not match, or there are too many tensors.
    """
    return _exchanged(True, tensors, sharding, group)


def heads_to_tokens(tensors: Sequence[Tensor], sharding: Sharding, group: ContextGroup) -> tuple[Tensor, ...]:
    """Inverts [`tokens_to_heads`].

    Args:
        tensors (one to six `torch.Tensor` of shape `(batch, length, heads / ranks, dim)`): All tokens of this rank's
            heads.
        sharding, group: As in [`tokens_to_heads`].

    Returns:
        `tuple[torch.Tensor, ...]` of shape `(batch, n, heads, dim)`: this rank's tokens of all heads.

    Raises:
        ShardingError: If shapes, sharding and group do not match, or there are too many tensors.
    """
    return _exchanged(False, tensors, sharding, group)


def _exchanged(
    to_heads: bool, tensors: Sequence[Tensor], sharding: Sharding, group: ContextGroup
) -> tuple[Tensor, ...]:
    """Returns the exchanged tensors; raises a ShardingError for those that cannot be exchanged."""
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ShardingError(
            f"{len(tensors)} tensors were given to be exchanged at once; give 1 to {MAX_TENSORS}, others by further "
            "calls."
        )
    tokens = sharding.tokens(group.rank) if to_heads and sharding.ranks == group.size else sharding.length
    for x in tensors:
        fits = x.ndim == 4 and x.shape[1] == tokens and (not to_heads or x.shape[2] % group.size == 0)
        if sharding.ranks != group.size or not fits:
            raise ShardingError(
                f"A tensor of shape {tuple(x.shape)} on rank {group.rank} of {group.size} does not fit "
                f"{sharding.length} tokens over {sharding.ranks} ranks, with heads in the third dimension that the "
                "ranks divide. Exchange what belongs to one head together, and tokens as the layout's sharding has "
                "them."
            )
    return tuple(tensors) if group.size == 1 else _HeadExchange.apply(to_heads, sharding, group, *tensors)


class _HeadExchange(torch.autograd.Function):
    """The exchange in one of the two directions; gradients go in the other."""

    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any, to_heads: bool, sharding: Sharding, group: ContextGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.to_heads, ctx.settings = to_heads, (sharding, group)
        owners = (ulysses_ranks_of(sharding, group.rank, group.size),) * len(tensors)
        own, whole = sharding.tokens(group.rank), sharding.length
        with resources_of(group).messages(tensors[0].device, "auto") as (exchange, _):
            if to_heads:
                results = [_empty(x, whole, x.shape[2] // group.size) for x in tensors]
                TokensToHeads(exchange, owners, tensors, slices=1).fetch(0, results, during_kernel=False).wait()
            else:
                results = [_empty(x, own, x.shape[2] * group.size) for x in tensors]
                leaving = HeadsToTokens(exchange, owners, results, slices=1)
                leaving.send(0, tensors)
                leaving.finish()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inverse = heads_to_tokens if ctx.to_heads else tokens_to_heads
        return None, None, None, *inverse(gradients, *ctx.settings)


def _empty(x: Tensor, tokens: int, heads: int) -> Tensor:
    """Returns memory for a share of a tensor; if `dim` is 1, heads come first in memory, as in messages."""
    if x.shape[3] == 1:
        return x.new_empty(x.shape[0], heads, tokens, 1).transpose(1, 2)
    return x.new_empty(x.shape[0], tokens, heads, x.shape[3])
