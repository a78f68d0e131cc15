"""The choice of a kernel: made once for a kind of input, logged with its reason."""

import logging
from functools import lru_cache

from torch import Tensor
from torch.nn import functional

from ..config import KernelName
from ..errors import KernelError
from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, Kernel, KernelRequest, OutputBuffers, Outputs, Scores
from .cpu_flash import CpuFlashKernel
from .ffpa import FfpaKernel
from .flash_2 import FlashAttn2Kernel, TorchFlashKernel
from .flash_attn_4 import FlashAttn4Kernel
from .reference import ReferenceKernel
from .torch_cudnn import TorchCudnnKernel
from .torch_efficient import TorchEfficientKernel

logger = logging.getLogger(__name__)


class PaddedHeads:
    """A kernel that wants one head size for q, k and v, or a multiple of some number, made to take any.

    Zeros appended to q and k add nothing to a score. Those appended to v add columns of zeros to the output, which are
    cut off. Sizes that the kernel takes stay as they are.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.capabilities = kernel.capabilities

    def for_sizes(self, head_dim: int, value_dim: int) -> Kernel:
        """The kernel for heads of these sizes: the inner one alone if it takes them as they are."""
        sizes, capabilities = (head_dim, value_dim), self.kernel.capabilities
        return self.kernel if all(padded_sizes(capabilities, *sizes, way) == sizes for way in (True, False)) else self

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return self.kernel.unavailable(*padded_sizes(self.kernel.capabilities, head_dim, value_dim, shared=True))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """See [`Kernel.forward`]; padded results are written elsewhere."""
        size, value_size = self._sizes(q, v)
        out, lse = self.kernel.forward(_pad(q, size), _pad(k, size), _pad(v, value_size), band, scores)
        return out[..., : v.shape[3]], lse

    def backward(self, inputs: BackwardInputs, band: Band, scores: Scores, buffers: OutputBuffers = ()) -> Gradients:
        """See [`Kernel.backward`]; padded results are written elsewhere."""
        dout, q, k, v, out, *_ = inputs
        size, value_size = self._sizes(q, v)
        padded = inputs._replace(
            dout=_pad(dout, value_size),
            q=_pad(q, size),
            k=_pad(k, size),
            v=_pad(v, value_size),
            out=None if out is None else _pad(out, value_size),
        )
        dq, dk, dv = self.kernel.backward(padded, band, scores)
        return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]

    def _sizes(self, q: Tensor, v: Tensor) -> tuple[int, int]:
        return padded_sizes(self.kernel.capabilities, q.shape[3], v.shape[3], shared=q.shape[2] != v.shape[2])


def padded_sizes(capabilities: Capabilities, head_dim: int, value_dim: int, shared: bool) -> tuple[int, int]:
    """The smallest head sizes of q and k and of v that a kernel takes and that hold these; `shared` says whether query
    heads share key heads."""
    if (head_dim, value_dim) in capabilities.value_dims and not shared:
        return head_dim, value_dim
    sizes, multiple = capabilities.head_sizes, capabilities.head_multiple
    size, value_size = (
        min(size for size in sizes if size >= dim) if sizes else dim + -dim % multiple for dim in (head_dim, value_dim)
    )
    return (size, value_size) if capabilities.own_value_dim else (max(size, value_size),) * 2


def _pad(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[3] == size else functional.pad(tensor, (0, size - tensor.shape[3]))


def make_kernels(deterministic: bool) -> tuple[Kernel, ...]:
    """All kernels, the fastest first (on H200s, head size 128, causal); those that can are made deterministic."""
    return (
        PaddedHeads(FlashAttn4Kernel(deterministic)),
        PaddedHeads(TorchCudnnKernel()),
        PaddedHeads(FlashAttn2Kernel(deterministic)),
        PaddedHeads(TorchFlashKernel(deterministic)),
        PaddedHeads(FfpaKernel()),
        PaddedHeads(TorchEfficientKernel(deterministic)),
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
    refusals, faster = list[str](), list[str]()
    for kernel in _DETERMINISTIC if request.deterministic else KERNELS:
        capabilities = kernel.capabilities
        if requested not in ("auto", capabilities.name):
            continue
        refusal = _refusal(kernel, requested, request)
        if refusal is None:
            reason = "asked for" if requested != "auto" else "; ".join(faster) or "the fastest for this device"
            plain = requested == "auto" and capabilities.name == "reference"
            logger.log(
                logging.WARNING if plain else logging.INFO,
                "hf_burst computes attention with the kernel %s (%s, %s, head size %d%s): %s%s",
                *(capabilities.name, *request[:3], ", deterministic" * request.deterministic, reason),
                ". Plain torch takes some 17 times as long as a kernel" if plain and request.device == "cuda" else "",
            )
            return kernel.for_sizes(request.head_dim, request.value_dim) if isinstance(kernel, PaddedHeads) else kernel
        refusals.append(f"{capabilities.name} {refusal}")
        faster += refusals[-1:] * (request.device in capabilities.devices)
    raise KernelError(
        f"No kernel computes {request}: {'; '.join(refusals)}. Set BurstConfig(kernel=...) to one that can, or "
        "convert the model."
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
