"""Numbers: in which dtype sums are taken, and derivatives that would be wrong in silence."""

import torch

from .errors import KernelError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_second_derivative() -> None:
    """Raises a [`KernelError`] in a backward pass with `create_graph=True`, which would lose a gradient silently."""
    if torch.is_grad_enabled():
        raise KernelError(
            "The loss and the outputs of a model over ranks have no second derivative: their gradients are found in "
            "the forward pass, or over messages. Do without create_graph=True, or detach the gradients."
        )
