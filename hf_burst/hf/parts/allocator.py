"""Torch's allocator on a GPU: what it holds and may hold, its settings, and what it leaves to the driver."""

import os
import sys
from typing import NamedTuple

import torch

from ...plan.memory_levels import TUNING

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPAND = "expandable_segments:True"
EXPANDABLE = (
    f"Set PYTORCH_ALLOC_CONF={_EXPAND} before Python starts: the gaps that torch's allocator leaves are then smaller, "
    "and longer sequences fit."
)


class Reading(NamedTuple):
    """The state of torch's allocator on a GPU: bytes, and how often it ran out of memory."""

    held: int
    most: int
    room: int  # most that it may hold
    errors: int

    @classmethod
    def of(cls, device: torch.device) -> "Reading | None":
        """Returns the reading of a device; `None` if the device counts none."""
        if device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        room = min(total * torch.cuda.get_per_process_memory_fraction(device), free + reserved)
        held, most = (stats.get(f"allocated_bytes.all.{name}", 0) for name in ("current", "peak"))
        return cls(held, most, int(room), stats.get("num_ooms", 0))


class RoomForKernels:
    """GPU memory that torch's allocator leaves to the driver until `end`, for Triton kernels that spill registers while
    they are tuned. The allocator keeps what was freed, and returns nothing when others ask."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, torch.cuda.get_per_process_memory_fraction(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        self.share = min(self.before, max(0.0, 1 - (others + TUNING) / total))
        torch.cuda.set_per_process_memory_fraction(self.share, device)

    def end(self) -> None:
        """Restores the allocator's share, unless somebody has set it since."""
        if abs(torch.cuda.get_per_process_memory_fraction(self.device) - self.share) < 1e-6:  # torch counts bytes
            torch.cuda.set_per_process_memory_fraction(self.before, self.device)


def expand_segments(ask: bool = True) -> bool:
    """Returns whether torch's allocator has expandable segments, which lose less in gaps. It is asked for them, unless
    the user has configured them or vLLM is there, whose pools cannot have them (pytorch/pytorch#147851)."""
    given = next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    fixed = "expandable_segments" in given or "backend" in given or "vllm" in sys.modules
    if not ask or fixed or change is None or not torch.cuda.is_initialized():
        return _EXPAND in given
    change(f"{given},{_EXPAND}".lstrip(","))
    return True
