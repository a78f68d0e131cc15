"""Kernels that compute one tile of attention. They know tiles, and nothing of ranks."""

from ..plan import Band
from .base import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelRequest,
    OutputBuffers,
    Outputs,
    Scores,
    from_host,
    project_out,
)
from .select import KERNELS, explain_kernels, make_kernels, select_kernel

# fmt: off
__all__ = [
    "KERNELS", "BackwardInputs", "Band", "Gradients", "Kernel", "KernelRequest", "OutputBuffers", "Outputs", "Scores",
    "explain_kernels", "from_host", "make_kernels", "project_out", "select_kernel",
]
# fmt: on
