"""The choice of a kernel: made once for a kind of input, logged with its reason."""

import logging
from functools import lru_cache

import torch

from ..config import KernelName
from ..errors import KernelError
from .base import Capabilities, Kernel
from .cpu_flash import CpuFlashKernel
from .flash_attn_2 import FlashAttn2Kernel
from .flash_attn_3 import FlashAttn3Kernel
from .flash_attn_4 import FlashAttn4Kernel
from .head_size import PaddedHeads
from .reference import ReferenceKernel
from .torch_cudnn import TorchCudnnKernel
from .torch_flash import TorchFlashKernel

logger = logging.getLogger(__name__)


def make_kernels(deterministic: bool) -> tuple[Kernel, ...]:
    """All kernels, the fastest first (on H200s, head size 128, causal); those that can are made deterministic."""
    return (
        PaddedHeads(FlashAttn4Kernel(deterministic)),
        PaddedHeads(FlashAttn3Kernel(deterministic)),
        PaddedHeads(TorchCudnnKernel()),
        PaddedHeads(FlashAttn2Kernel(deterministic)),
        PaddedHeads(TorchFlashKernel(deterministic)),
        PaddedHeads(CpuFlashKernel()),
        ReferenceKernel(),
    )


KERNELS = make_kernels(False)
_DETERMINISTIC = make_kernels(True)


@lru_cache(maxsize=256)
def select_kernel(
    requested: KernelName,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: bool = False,
    deterministic: bool = False,
    window: bool = False,
) -> Kernel:
    """The kernel that computes such an attention.

    Args:
        requested (`str`): A name, or `"auto"` for the fastest that can.
        device (`str`): Type of the device.
        dtype (`torch.dtype`): Dtype of q, k and v.
        head_dim (`int`): Head size of q and k.
        value_dim (`int`): Head size of v.
        softcap (`bool`, defaults to `False`): Whether scores are soft-capped.
        deterministic (`bool`, defaults to `False`): Whether the backward pass must give the same bits each time.
        window (`bool`, defaults to `False`): Whether there is a sliding window.

    Raises:
        KernelError: If the kernel asked for, or every one, cannot compute it; the message says why.
    """
    kernels = _DETERMINISTIC if deterministic else KERNELS
    refusals: list[tuple[Capabilities, str]] = []
    for kernel in kernels:
        capabilities = kernel.capabilities
        if requested not in ("auto", capabilities.name):
            continue
        refusal = _refusal(kernel, device, dtype, head_dim, value_dim, softcap, deterministic, window)
        if refusal is None and requested == "auto" and capabilities.by_name:
            refusal = capabilities.by_name
        if refusal is None:
            faster = _joined([(other, why) for other, why in refusals if device in other.devices])
            reason = "asked for" if requested != "auto" else faster or "the fastest for this device"
            slow = requested == "auto" and capabilities.name == "reference"
            logger.log(
                logging.WARNING if slow else logging.INFO,
                "hf_burst computes attention with the kernel %s (%s, %s, head size %d%s): %s",
                *(capabilities.name, device, dtype, head_dim, ", deterministic" if deterministic else "", reason),
            )
            return kernel.for_sizes(head_dim, value_dim) if isinstance(kernel, PaddedHeads) else kernel
        refusals.append((capabilities, refusal))
    features = f"{' and soft-capped scores' if softcap else ''}{' and a sliding window' if window else ''}"
    able = ", ".join(kernel.capabilities.name for kernel in kernels if kernel.capabilities.deterministic)
    raise KernelError(
        f"No {'deterministic ' if deterministic else ''}kernel for {dtype} on {device} with head sizes {head_dim} "
        f"(q, k) and {value_dim} (v){features}: {_joined(refusals)}. "
        f"{f'Deterministic ones are {able}. ' if deterministic else ''}"
        "Set BurstConfig(kernel=...) to one that can, or convert the model."
    )


def explain_kernels(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: bool = False,
    deterministic: bool = False,
    window: bool = False,
) -> list[tuple[str, str | None]]:
    """What [`select_kernel`] goes by: each kernel, the fastest first, and why it cannot compute such an attention here,
    or why `"auto"` passes it over; `None` if nothing speaks against it. The arguments are those of `select_kernel`.
    """
    kernels = _DETERMINISTIC if deterministic else KERNELS
    return [
        (
            kernel.capabilities.name,
            _refusal(kernel, device, dtype, head_dim, value_dim, softcap, deterministic, window)
            or kernel.capabilities.by_name
            or None,
        )
        for kernel in kernels
    ]


def _refusal(
    kernel: Kernel, device: str, dtype: torch.dtype, head_dim: int, value_dim: int, *wishes: bool
) -> str | None:
    """Why a kernel cannot, by its capabilities and then by what this machine has."""
    refusal = kernel.capabilities.refusal(device, dtype, head_dim, value_dim, *wishes)
    return kernel.unavailable(head_dim, value_dim) if refusal is None else refusal


def _joined(refusals: list[tuple[Capabilities, str]]) -> str:
    return "; ".join(f"{capabilities.name} {why}" for capabilities, why in refusals)
