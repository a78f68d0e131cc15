"""The context parallelism of flash-linear-attention, for the shardings that it knows.

Its kernels find what a shard does to a state by a pass of their own over keys and values, which costs less than columns
appended to the values.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from ..kernels import from_host
from ..mesh import ContextGroup
from ..plan import Segments, Sharding, pattern


def cp_context(segments: Segments, group: ContextGroup, device: torch.device) -> Any:
    """What the functions of flash-linear-attention take as `cp_context`.

    Args:
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where the tensors lie.

    Returns:
        `fla.ops.cp.FLACPContext`, or `None` where that package cannot compute such shards: it takes one row, in equal
        chunks that are contiguous or zigzag, on NVIDIA GPUs from Ampere on.
    """
    known = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return _context(segments, group, device) if known and group.size > 1 and len(segments.documents) == 1 else None


@lru_cache(maxsize=8)  # one for all layers of a pass: its tensors are copied to the device once
def _context(segments: Segments, group: ContextGroup, device: torch.device) -> Any:
    layout = layout_of(segments.sharding)
    if layout is None:
        return None
    from fla.ops.cp import build_cp_context

    bounds = segments.documents[0]
    return build_cp_context(
        from_host(bounds, torch.int64, device), group.process_group, cu_seqlens_cpu=torch.tensor(bounds), layout=layout
    )


def layout_of(sharding: Sharding) -> str | None:
    """The name by which flash-linear-attention knows a sharding, if it does."""
    sizes = {stop - start for start, stop in pairwise(sharding.boundaries)}
    for name in ("contiguous", "zigzag"):
        if len(sizes) == 1 and sharding.owners == pattern(sharding.ranks, name):
            return name
    return None
