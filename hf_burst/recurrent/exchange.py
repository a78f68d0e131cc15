"""Whole sequences of some heads in place of some tokens of all heads, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import heads_to_tokens, tokens_to_heads
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup
from .replay import Shards


def to_heads(tensors: Sequence[Tensor], shards: Shards) -> list[Tensor]:
    """This rank's tokens of all heads, `(batch, n, heads, ...)` each, for all tokens of its heads, `(batch, length,
    most heads of a rank, ...)`. Heads of zeros are appended where the ranks do not divide them."""
    flat = [x.reshape(*x.shape[:3], -1) for x in tensors]
    size = shards.group.size
    padded = [functional.pad(x, (0, 0, 0, -x.shape[2] % size)) if x.shape[2] % size else x for x in flat]
    whole = tokens_to_heads(padded, shards.segments.sharding, shards.group)
    return [heads.reshape(*heads.shape[:3], *x.shape[3:]) for heads, x in zip(whole, tensors, strict=True)]


def to_tokens(x: Tensor, heads: int, shards: Shards) -> Tensor:
    """The way back of outputs `(batch, length, most heads of a rank, dim)`, to `(batch, n, heads, dim)`."""
    (tokens,) = heads_to_tokens([x], shards.segments.sharding, shards.group)
    return tokens if tokens.shape[2] == heads else tokens[:, :, :heads]


def own_heads(x: Tensor, group: ContextGroup) -> Tensor:
    """What belongs to the heads of this rank, of a tensor `(heads, ...)`; zeros for those that are appended."""
    padded = functional.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % group.size))
    return padded.chunk(group.size)[group.rank]


def whole_tokens(x: Tensor, shards: Shards) -> Tensor:
    """All tokens, `(batch, length, ...)`, from this rank's, `(batch, n, ...)`."""
    parts, sharding = all_gather(x, shards.group), shards.segments.sharding
    runs = sorted((run.start, rank, run) for rank in range(shards.group.size) for run in sharding.runs(rank))
    return torch.cat([parts[rank][:, run.local : run.local + run.size] for _, rank, run in runs], dim=1)
