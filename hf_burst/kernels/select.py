"""The choice of a kernel: made once for a kind of input, logged with its reason."""

import logging
from functools import lru_cache

from ..config import KernelName
from ..errors import KernelError
from .base import Capabilities, Kernel, KernelRequest
from .cpu_flash import CpuFlashKernel
from .flash_attn_2 import FlashAttn2Kernel
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
        PaddedHeads(TorchCudnnKernel()),
        PaddedHeads(FlashAttn2Kernel(deterministic)),
        PaddedHeads(TorchFlashKernel(deterministic)),
        PaddedHeads(CpuFlashKernel()),
        ReferenceKernel(),
    )


KERNELS = make_kernels(False)
_DETERMINISTIC = make_kernels(True)


@lru_cache(maxsize=256)
def select_kernel(requested: KernelName, request: KernelRequest) -> Kernel:
    """The kernel that computes such an attention.

    Args:
        requested (`str`): A name, or `"auto"` for the fastest that can.
        request ([`KernelRequest`]): The properties of the attention.

    Raises:
        KernelError: If the kernel asked for, or every one, cannot compute it; the message says why.
    """
    kernels = _DETERMINISTIC if request.deterministic else KERNELS
    refusals: list[tuple[Capabilities, str]] = []
    for kernel in kernels:
        capabilities = kernel.capabilities
        if requested not in ("auto", capabilities.name):
            continue
        refusal = _refusal(kernel, requested, request)
        if refusal is None:
            faster = _joined([(passed, why) for passed, why in refusals if request.device in passed.devices])
            reason = "asked for" if requested != "auto" else faster or "the fastest for this device"
            plain = requested == "auto" and capabilities.name == "reference"
            logger.log(
                logging.WARNING if plain else logging.INFO,
                "hf_burst computes attention with the kernel %s (%s, %s, head size %d%s): %s%s",
                *(capabilities.name, *request[:3], ", deterministic" * request.deterministic, reason),
                ". Plain torch takes some 17 times as long as a kernel" if plain and request.device == "cuda" else "",
            )
            return kernel.for_sizes(request.head_dim, request.value_dim) if isinstance(kernel, PaddedHeads) else kernel
        refusals.append((capabilities, refusal))
    raise KernelError(
        f"No kernel computes {request}: {_joined(refusals)}. Set BurstConfig(kernel=...) to one that can, or convert "
        "the model."
    )


def explain_kernels(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Each kernel, the fastest first, and why it cannot compute such an attention here, or why `"auto"` passes it over;
    `None` if nothing speaks against it."""
    kernels = _DETERMINISTIC if request.deterministic else KERNELS
    return [(kernel.capabilities.name, _refusal(kernel, "auto", request)) for kernel in kernels]


def _refusal(kernel: Kernel, requested: KernelName, request: KernelRequest) -> str | None:
    """Why a kernel is not taken: by its capabilities, then by its package and this machine."""
    refusal = kernel.capabilities.refusal(request) or kernel.unavailable(request.head_dim, request.value_dim)
    return refusal or (kernel.capabilities.auto_refusal if requested == "auto" else None)


def _joined(refusals: list[tuple[Capabilities, str]]) -> str:
    return "; ".join(f"{capabilities.name} {why}" for capabilities, why in refusals)
