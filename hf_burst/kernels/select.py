"""The choice of a kernel: made once for a kind of input, logged with its reason."""

import logging
from functools import lru_cache

import torch

from ..config import KernelName
from ..errors import KernelError
from .base import Kernel
from .cpu_flash import CpuFlashKernel
from .head_size import PaddedHeads
from .reference import ReferenceKernel
from .torch_flash import TorchFlashKernel

logger = logging.getLogger(__name__)

# the fastest first
KERNELS: tuple[Kernel, ...] = (PaddedHeads(TorchFlashKernel()), PaddedHeads(CpuFlashKernel()), ReferenceKernel())


@lru_cache(maxsize=256)
def select_kernel(
    requested: KernelName, device: str, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: bool = False
) -> Kernel:
    """The kernel that computes such an attention.

    Args:
        requested (`str`): A name, or `"auto"` for the fastest that can.
        device (`str`): Type of the device.
        dtype (`torch.dtype`): Dtype of q, k and v.
        head_dim (`int`): Head size of q and k.
        value_dim (`int`): Head size of v.
        softcap (`bool`, defaults to `False`): Whether scores are soft-capped.

    Raises:
        KernelError: If the kernel asked for, or every one, cannot compute it; the message says why.
    """
    wanted = [kernel for kernel in KERNELS if requested in ("auto", kernel.card.name)]
    refusals: list[str] = []
    for kernel in wanted:
        refusal = kernel.card.refusal(device, dtype, head_dim, value_dim, softcap)
        if refusal is None:
            reason = "asked for" if requested != "auto" else "; ".join(refusals) or "the fastest for this device"
            slow = requested == "auto" and kernel.card.name == "reference"
            logger.log(
                logging.WARNING if slow else logging.INFO,
                "hf_burst computes attention with the kernel %s (%s, %s, head size %d): %s",
                *(kernel.card.name, device, dtype, head_dim, reason),
            )
            return kernel
        refusals.append(f"{kernel.card.name} {refusal}")
    raise KernelError(
        f"No kernel for {dtype} on {device} with head sizes {head_dim} (q, k) and {value_dim} (v)"
        f"{' and soft-capped scores' if softcap else ''}: "
        f"{'; '.join(refusals)}. Set BurstConfig(kernel=...) to one that can, or convert the model."
    )
