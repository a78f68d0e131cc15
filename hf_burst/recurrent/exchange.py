"""Exchanges some tokens of all heads for whole sequences of some heads, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import heads_to_tokens, tokens_to_heads
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup
from .replay import Shards


def to_heads(tensors: Sequence[Tensor], shards: Shards) -> list[Tensor]:
    """Exchanges this rank's tokens of all heads, `(batch, n, heads, ...)` each, for all tokens of its own heads,
    `(batch, length, heads per rank, ...)`. If the ranks do not divide the heads, appends heads of zeros, and repeats
    those that others share."""
    size, heads = shards.group.size, max(x.shape[2] for x in tensors)
    flat = [x.reshape(*x.shape[:3], -1) for x in tensors]
    flat = [
        x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] % size and x.shape[2] < heads else x for x in flat
    ]
    padded = [functional.pad(x, (0, 0, 0, -x.shape[2] % size)) if x.shape[2] % size else x for x in flat]
    whole = tokens_to_heads(padded, shards.segments.sharding, shards.group)
    return [heads.reshape(*heads.shape[:3], *x.shape[3:]) for heads, x in zip(whole, tensors, strict=True)]


def to_tokens(x: Tensor, heads: int, shards: Shards) -> Tensor:
    """Exchanges outputs `(batch, length, heads per rank, dim)` back to `(batch, n, heads, dim)`."""
    (tokens,) = heads_to_tokens([x], shards.segments.sharding, shards.group)
    return tokens if tokens.shape[2] == heads else tokens[:, :, :heads]


def own_heads(x: Tensor, group: ContextGroup) -> Tensor:
    """Returns the part of a tensor `(heads, ...)` for this rank's heads; zeros for appended heads."""
    return functional.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % group.size)).chunk(group.size)[group.rank]


def whole_tokens(x: Tensor, shards: Shards) -> Tensor:
    """Gathers all tokens, `(batch, length, ...)`, from each rank's, `(batch, n, ...)`."""
    parts, places = all_gather(x, shards.group), shards.segments.sharding.places
    return torch.cat([parts[rank][:, run.local : run.local + run.size] for run, rank in places], dim=1)
