"""Numerics: the dtype of sums, and the refusal of derivatives that would be silently wrong."""

import torch

from .errors import KernelError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp64 for fp64, and fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_second_derivative() -> None:
    """Raises a [`KernelError`] in a backward pass with `create_graph=True`, which would lose a gradient silently."""
    if torch.is_grad_enabled():
        raise KernelError(
            "Attention, and the loss and the outputs of a model over ranks, have no second derivative: their gradients "
            "are found by kernels, in the forward pass, or over messages. Do without create_graph=True, or detach them."
        )
