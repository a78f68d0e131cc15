"""The token-weighted loss of a sharded batch, and the gather of what the ranks computed for their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..ring import accumulation_dtype
from .collectives import all_gather
from .group import ContextGroup
from .layout import SequenceLayout

IGNORE_INDEX = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Labels moved so that token i holds the label of token i + 1; the last one is ignored. Before any sharding."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of this rank's tokens, in fp32 (fp64 for fp64).

    Args:
        logits (`torch.Tensor` of shape `(batch, n, vocabulary)`): Scores.
        targets (`torch.LongTensor` of shape `(batch, n)`): Shifted labels of the same tokens; -100 does not count.
    """
    wide, labels = logits.to(accumulation_dtype(logits.dtype)).flatten(0, -2), targets.flatten().to(logits.device)
    return functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token, `(batch, n)`, as [`token_loss_sum`] adds them up; 0 for targets of -100."""
    wide = logits.to(accumulation_dtype(logits.dtype)).transpose(1, 2)
    return functional.cross_entropy(wide, targets.to(logits.device), ignore_index=IGNORE_INDEX, reduction="none")


@torch.compiler.disable
def group_loss(local_sum: Tensor, weight: Tensor | float, group: ContextGroup) -> Tensor:
    """The loss of the whole batch from each rank's sum: the same value on every rank of the group.

    Its gradient is `size` times that of this rank's part, since data-parallel wrappers average gradients over all
    ranks, of which those of a group hold one batch.

    Args:
        local_sum (`torch.Tensor`, scalar): Sum over this rank's tokens.
        weight (`torch.Tensor` or `float`): What a token counts, 1 / tokens.
        group ([`ContextGroup`]): The ranks.
    """
    return group_sum(local_sum * weight, group)


def group_sum(tensor: Tensor, group: ContextGroup) -> Tensor:
    """The sum over the ranks of tensors of one shape, the same on every rank, with a gradient as that of
    [`group_loss`]."""
    return tensor if group.size == 1 else _GroupSum.apply(tensor, group)


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


def gather_kept(tensor: Tensor, kept: Sequence[Sequence[int]], group: ContextGroup) -> Tensor:
    """The rows that each rank kept, put together.

    Args:
        tensor (`torch.Tensor` of shape `(batch, rows of this rank, ...)`): This rank's rows.
        kept (`Sequence[Sequence[int]]`): For each rank, the places of its rows in the result.
        group ([`ContextGroup`]): The ranks.
    """
    most = max(len(places) for places in kept)
    shards = all_gather(functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, most - tensor.shape[1])), group)
    parts = zip(shards, kept, strict=True)
    rows = {place: shard[:, index] for shard, places in parts for index, place in enumerate(places)}
    return torch.stack([rows[place] for place in sorted(rows)], dim=1)


class _GroupSum(torch.autograd.Function):
    """A sum over the group, whose gradient is that of this rank's part times the size of the group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ContextGroup) -> Tensor:
        ctx.size = group.size
        total = value.detach().clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.size, None
