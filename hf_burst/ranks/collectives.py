"""Messages with a gradient, of the backend of the process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import KernelError
from .group import ContextGroup


def all_gather(tensor: Tensor, group: ContextGroup, kept: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """The tensors of all ranks, of one shape. On the way back, the gradients of all ranks for a tensor are summed.
    With what was `kept` of an earlier call for the same tensor, nothing is sent forward."""
    return _AllGather.apply(tensor, group, kept) if group.size > 1 else (tensor,)


def refuse_second_derivative() -> None:
    """Raises a [`KernelError`] in a backward pass with `create_graph=True`, which would lose a gradient silently."""
    if torch.is_grad_enabled():
        raise KernelError(
            "The loss and the outputs of a model over ranks have no second derivative: their gradients are found in "
            "the forward pass, or over messages. Do without create_graph=True, or detach the gradients."
        )


class _AllGather(torch.autograd.Function):
    """The tensors of all ranks; backward, the sum over the ranks of the gradients of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, kept: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        ctx.group = group
        if kept is not None:
            return tuple(shard.detach() for shard in kept)
        shards = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(group.size)]
        dist.all_gather(shards, tensor.contiguous(), group=group.process_group)
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative()
        total = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(total, [gradient.contiguous() for gradient in gradients], group=ctx.group.process_group)
        return total, None, None
