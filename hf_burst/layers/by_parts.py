"""What is computed from hidden states, some tokens at a time, and its gradients, which are summed in fp32.

A sum (`linear_loss.py`) knows its gradients in the forward pass. One number per token does not: its scores are computed
once for the values, and again in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype, refuse_second_derivative
from .surroundings import draws_as_now

# maps the hidden states of some tokens, `(1, m, hidden)`, and their slice to outputs and the outputs' gradients (`None`
# for a scalar)
Compute = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
# maps hidden states of some tokens, `(1, m, hidden)`, and their slice of the flattened batch to values `(m,)`
Value = Callable[[Tensor, slice], Tensor]


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


def token_values(hidden: Tensor, value: Value, rows: int, learned: list[Tensor]) -> Tensor:
    """Returns the value of each token, `(batch, n)`.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): Hidden states to score.
        value (`Callable`): Computes the values of some tokens. The backward pass calls it again, with the same random
            numbers.
        rows (`int`): Tokens at a time.
        learned (list of `torch.Tensor`): The parameters of `value` that get gradients.
    """
    return _TokenValues.apply(hidden, value, rows, *learned)


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Value, rows: int, *learned: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.value, ctx.rows, ctx.learned, ctx.draws = value, rows, learned, draws_as_now(hidden)
        flat = hidden.detach().flatten(0, -2)
        return torch.cat([value(flat[None, part], part) for part in parts_of(len(flat), rows)]).view(hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        (hidden,), upstream, value = ctx.saved_tensors, gradient.flatten(), ctx.value
        flat = hidden.detach().flatten(0, -2)
        with ctx.draws():
            dhidden, *found = gradients_by_parts(
                flat, ctx.rows, lambda states, part: (value(states, part), upstream[part]), ctx.learned
            )
        return dhidden.view(hidden.shape), None, None, *found
