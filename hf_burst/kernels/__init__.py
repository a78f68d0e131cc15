"""Kernels that compute one tile of attention. They know tiles, and nothing of ranks."""

from .base import Band, Capabilities, Kernel, OutputBuffers, Scores, from_host, project_out
from .select import KERNELS, explain_kernels, make_kernels, select_kernel

__all__ = [
    "KERNELS",
    "Band",
    "Capabilities",
    "Kernel",
    "OutputBuffers",
    "Scores",
    "explain_kernels",
    "from_host",
    "make_kernels",
    "project_out",
    "select_kernel",
]
