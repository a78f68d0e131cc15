"""Differentiable collectives on the process group's backend."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..numerics import refuse_second_derivative
from .group import ContextGroup

Gathered = tuple[Tensor, ...]  # by rank


def all_gather(tensor: Tensor, group: ContextGroup, saved: Gathered | None = None) -> Gathered:
    """Gathers the tensors of all ranks, of one shape. The backward pass sums each tensor's gradients over the ranks. If
    `saved`, the result of an earlier call for the same tensor, is given, returns it without communicating."""
    if group.size == 1:
        return (tensor,)
    with group.messages() if saved is None else nullcontext():
        return _AllGather.apply(tensor, group, saved)


def gather_stacked(tensor: Tensor, group: ContextGroup) -> Tensor:
    """Gathers the tensors of all ranks, of one shape, stacked in rank order, without a gradient."""
    if group.size == 1:
        return tensor[None]
    every = tensor.new_empty(group.size, *tensor.shape)
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
    gather_into(every.flatten(0, 1), tensor.contiguous(), group=group.process_group)
    return every


def group_sum(tensor: Tensor, group: ContextGroup) -> Tensor:
    """Sums tensors of one shape over the ranks, the same on every rank.

    The gradient is that of this rank's part times `size`, because data-parallel wrappers average gradients over all
    ranks, but the `size` ranks of a group hold one batch.
    """
    if group.size == 1:
        return tensor
    with group.messages():
        return _GroupSum.apply(tensor, group)


class _AllGather(torch.autograd.Function):
    """An all-gather whose backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, saved: Gathered | None) -> Gathered:
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
    """A sum over the group, whose backward pass multiplies this rank's gradient by the group size."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ContextGroup) -> Tensor:
        ctx.size = group.size
        total = value.detach().clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None
