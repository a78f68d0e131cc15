"""The exchange of heads as a differentiable operation: for layers that treat each head by itself and every token in its
place, such as recurrent ones. Attention exchanges by the same rounds, slice by slice."""

from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError
from ..mesh import ContextGroup
from ..plan import Sharding
from ..resources import resources_of
from ..ring import HeadsToTokens, TokensToHeads, ulysses_ranks_of


def tokens_to_heads(x: Tensor, sharding: Sharding, group: ContextGroup, transport: str = "auto") -> Tensor:
    """Gives this rank's tokens of most heads away, and gets all tokens of its own heads.

    Args:
        x (`torch.Tensor` of shape `(batch, n, heads, dim)`): This rank's tokens, of any ownership of chunks. The size
            of the group divides the heads.
        sharding ([`Sharding`]): Which rank holds which tokens; equal on all ranks.
        group ([`ContextGroup`]): The ranks. Every one of them calls it at the same time, with equal batch and heads.
        transport (`str`, defaults to `"auto"`): As in [`BurstConfig`].

    Returns:
        `torch.Tensor` of shape `(batch, length, heads / ranks, dim)`, in the sequence's order; rank r has the r-th
        share of the heads. Its gradient takes the way back, see [`heads_to_tokens`].

    Raises:
        ShardingError: If shapes, sharding and group do not fit.
    """
    _check(x, sharding, group, x.shape[1] if x.ndim == 4 else 0, x.shape[2] if x.ndim == 4 else 0)
    return x if group.size == 1 else _HeadExchange.apply(x, True, sharding, group, transport)


def heads_to_tokens(x: Tensor, sharding: Sharding, group: ContextGroup, transport: str = "auto") -> Tensor:
    """The inverse of [`tokens_to_heads`].

    Args:
        x (`torch.Tensor` of shape `(batch, length, heads / ranks, dim)`): All tokens of this rank's heads.
        sharding, group, transport: As in [`tokens_to_heads`].

    Returns:
        `torch.Tensor` of shape `(batch, n, heads, dim)`: this rank's tokens of all heads.

    Raises:
        ShardingError: If shapes, sharding and group do not fit.
    """
    own = sharding.tokens(group.rank) if x.ndim == 4 and x.shape[1] == sharding.length else -1
    _check(x, sharding, group, own, group.size)
    return x if group.size == 1 else _HeadExchange.apply(x, False, sharding, group, transport)


def _check(x: Tensor, sharding: Sharding, group: ContextGroup, tokens: int, heads: int) -> None:
    fits = sharding.ranks == group.size and tokens == sharding.tokens(group.rank)
    if x.ndim != 4 or not fits or heads % group.size:
        raise ShardingError(
            f"A tensor of shape {tuple(x.shape)} on rank {group.rank} of {group.size} does not fit {sharding.length} "
            f"tokens over {sharding.ranks} ranks, with heads in the third dimension that the ranks divide. Exchange "
            "what belongs to one head together, and tokens as the layout's sharding has them."
        )


class _HeadExchange(torch.autograd.Function):
    """One of the two ways; its gradient takes the other one."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, x: Tensor, to_heads: bool, sharding: Sharding, group: ContextGroup, transport: str) -> Tensor:
        ctx.to_heads, ctx.settings = to_heads, (sharding, group, transport)
        owner, (batch, _, heads, dim) = ulysses_ranks_of(sharding, group.rank, group.size), x.shape
        with resources_of(group).messages(x.device, transport) as exchange:
            if to_heads:
                result = x.new_empty(batch, sharding.length, heads // group.size, dim)
                TokensToHeads(exchange, (owner,), (x,), slices=1).fetch(0, (result,), beside_kernel=False).wait()
            else:
                result = x.new_empty(batch, sharding.tokens(group.rank), heads * group.size, dim)
                leaving = HeadsToTokens(exchange, (owner,), (result,), slices=1)
                leaving.send(0, (x,))
                leaving.finish()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inverse = heads_to_tokens if ctx.to_heads else tokens_to_heads
        return inverse(gradients[0], *ctx.settings), None, None, None, None
