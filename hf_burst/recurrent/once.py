"""Device tensors made once per batch, for all layers."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..plan import Segments

_Made = TypeVar("_Made")


def made_once(segments: Segments, make: Callable[..., _Made], device: torch.device, *arguments: Any) -> _Made:
    """Returns `make(segments, device, *arguments)`, made once on the first caller's stream for all layers and passes of
    the batch. During CUDA graph capture it is made anew, because the result belongs to that graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make(segments, device, *arguments)
    with torch.inference_mode(False):  # a later pass over the same batch may train
        return segments.once(make, device, *arguments)
