"""Messages with a gradient, of the backend of the process group."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..numerics import refuse_second_derivative
from .group import ContextGroup
from .layout import SequenceLayout


def all_gather(tensor: Tensor, group: ContextGroup, saved: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """The tensors of all ranks, of one shape. The backward pass sums the gradients of all ranks for a tensor. If
    `saved` is given, the result of an earlier call for the same tensor, returns it without communicating."""
    if group.size == 1:
        return (tensor,)
    with _messages(group) if saved is None else nullcontext():
        return _AllGather.apply(tensor, group, saved)


def gather_stacked(tensor: Tensor, group: ContextGroup) -> Tensor:
    """The tensors of all ranks, of one shape, stacked in rank order. It has no gradient."""
    if group.size == 1:
        return tensor[None]
    every = tensor.new_empty(group.size, *tensor.shape)
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
    gather_into(every.flatten(0, 1), tensor.contiguous(), group=group.process_group)
    return every


@torch.compiler.disable
def group_loss(local_sum: Tensor, weight: Tensor | float, group: ContextGroup) -> Tensor:
    """The loss of the whole batch from each rank's sum: the same value on every rank of the group.

    Its gradient is `size` times that of this rank's part, because data-parallel wrappers average gradients over all
    ranks, while the `size` ranks of a group hold one batch.

    Args:
        local_sum (`torch.Tensor`, scalar): Sum over this rank's tokens.
        weight (`torch.Tensor` or `float`): What a token counts, 1 / tokens.
        group ([`ContextGroup`]): The ranks.
    """
    return group_sum(local_sum * weight, group)


def group_sum(tensor: Tensor, group: ContextGroup) -> Tensor:
    """The sum over the ranks of tensors of one shape, the same on every rank, with a gradient as that of
    [`group_loss`]."""
    if group.size == 1:
        return tensor
    with _messages(group):
        return _GroupSum.apply(tensor, group)


def _messages(group: ContextGroup) -> AbstractContextManager[None]:
    """Has an error say which rank was lost, and why; but for graphs, which can tell nobody."""
    return nullcontext() if torch.compiler.is_compiling() else group.messages()


def gather_tokens(tensor: Tensor, layout: SequenceLayout, group: ContextGroup) -> Tensor:
    """The whole batch, in sequence order and without padding, on every rank.

    Args:
        tensor (`torch.Tensor` of shape `(batch, n, ...)`): What this rank computed for its tokens.
        layout ([`SequenceLayout`]): How they lie.
        group ([`ContextGroup`]): The ranks.

    Returns:
        `torch.Tensor` of shape `(batch, length, ...)`; gradients of all ranks are summed on the way back.
    """
    return layout.unshard(all_gather(tensor, group))


class _AllGather(torch.autograd.Function):
    """The tensors of all ranks; backward, the sum over the ranks of the gradients of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, saved: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        ctx.group = group
        if saved is not None:
            return tuple(shard.detach() for shard in saved)
        shards = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(group.size)]
        dist.all_gather(shards, tensor.contiguous(), group=group.process_group)
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        total = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(total, [gradient.contiguous() for gradient in gradients], group=ctx.group.process_group)
        return total, None, None


class _GroupSum(torch.autograd.Function):
    """A sum over the group. Its gradient is that of this rank's part, times the size of the group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ContextGroup) -> Tensor:
        ctx.size = group.size
        total = value.detach().clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None
