"""Gradients of what is computed from hidden states, some tokens at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype

# maps the hidden states of some tokens, `(1, m, hidden)`, and their slice to outputs and the outputs' gradients (`None`
# for a scalar)
Compute = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]


def parts_of(tokens: int, rows: int) -> list[slice]:
    """Returns the slices of `rows` tokens each."""
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def gradients_by_parts(
    hidden: Tensor, rows: int, compute: Compute, weights: Sequence[Tensor], wanted: bool = True
) -> list[Any]:
    """Returns the gradients of hidden states `(n, hidden)`, or `None` if not `wanted`, and of weights, summed in fp32
    (fp64 for fp64)."""
    sums = [torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) for weight in weights]
    dhidden = torch.zeros_like(hidden) if wanted else None
    for part in parts_of(len(hidden), rows):
        with torch.set_grad_enabled(wanted or bool(weights)):
            states = hidden[None, part].requires_grad_(wanted)
            outputs, upstream = compute(states, part)
        if outputs.requires_grad:
            learn = [states, *weights] if wanted else weights
            found = list(torch.autograd.grad(outputs, learn, upstream, allow_unused=True))
            own = found.pop(0) if wanted else None
            if dhidden is not None and own is not None:
                dhidden[part] = own[0]
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
    return [dhidden, *(total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))]
