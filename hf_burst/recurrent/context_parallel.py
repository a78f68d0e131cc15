"""The context parallelism of flash-linear-attention, for the shardings that it knows.

Its kernels find what a shard does to a state by a pass of their own over keys and values, which costs less than columns
appended to the values.
"""

from typing import Any

import torch

from ..kernels import from_host
from ..mesh import ContextGroup
from ..plan import Segments, pattern_of
from ..resources import resources_of


def cp_context(segments: Segments, group: ContextGroup, device: torch.device) -> Any:
    """What the functions of flash-linear-attention take as `cp_context`.

    Args:
        segments ([`Segments`]): Those of all ranks.
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where the tensors lie.

    Returns:
        `fla.ops.cp.FLACPContext`, or `None` where that package cannot compute such shards, or was not compared: it
        takes one document, in equal chunks that are contiguous or zigzag, on NVIDIA GPUs from Ampere on.
    """
    known = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    one_document = len(segments.documents) == 1 and len(segments.documents[0]) == 2
    return _context(segments, group, device) if known and one_document and group.size > 1 else None


def _context(segments: Segments, group: ContextGroup, device: torch.device) -> Any:
    """One for all layers of a pass: its tensors are copied to the device once."""
    layout, resources = pattern_of(segments.sharding), resources_of(group)
    if layout is None:
        return None
    if resources.context is None or resources.context[0] is not segments:
        from fla.ops.cp import build_cp_context

        bounds = segments.documents[0]
        with torch.inference_mode(False):  # a later pass over the same batch may train
            lengths, on_host = from_host(bounds, torch.int64, device), torch.tensor(bounds)
            made = build_cp_context(lengths, group.process_group, cu_seqlens_cpu=on_host, layout=layout)
        resources.context = segments, made
    return resources.context[1]
