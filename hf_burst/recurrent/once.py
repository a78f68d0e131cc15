"""What a batch lays on a device once, for all layers."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..plan import Segments

_Made = TypeVar("_Made")


def made_once(segments: Segments, make: Callable[..., _Made], device: torch.device, *arguments: Any) -> _Made:
    """What `make(segments, device, *arguments)` lays on a device, for all layers of a pass and for later passes over
    the batch, on the stream of the first one. What is made while a CUDA graph is captured belongs to that graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make(segments, device, *arguments)
    with torch.inference_mode(False):  # a later pass over the same batch may train
        return segments.once(make, device, *arguments)
