"""One differentiable number per token, computed from its scores, some tokens at a time.

Unlike a sum (`linear_loss.py`), the forward pass does not know the upstream gradient of each token. So the scores are
computed once for the values and again in the backward pass. Gradients are summed in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype, refuse_second_derivative

# maps hidden states of some tokens, `(1, m, hidden)`, and their slice of the flattened batch to values `(m,)`
Value = Callable[[Tensor, slice], Tensor]


def token_values(hidden: Tensor, value: Value, rows: int, learned: list[Tensor]) -> Tensor:
    """Returns the value of each token, `(batch, n)`.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): Hidden states to score.
        value (`Callable`): Computes the values of some tokens. The backward pass calls it again.
        rows (`int`): Tokens at a time.
        learned (list of `torch.Tensor`): The parameters of `value` that get gradients.
    """
    return _TokenValues.apply(hidden, value, rows, *learned)


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Value, rows: int, *learned: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.value, ctx.rows, ctx.learned = value, rows, learned
        flat = hidden.detach().flatten(0, -2)
        return torch.cat([value(flat[None, part], part) for part in _parts(len(flat), rows)]).view(hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        (hidden,) = ctx.saved_tensors
        flat, upstream = hidden.detach().flatten(0, -2), gradient.flatten()
        sums = [torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) for weight in ctx.learned]
        dhidden = torch.empty_like(flat)
        for part in _parts(len(flat), ctx.rows):
            with torch.enable_grad():
                states = flat[None, part].requires_grad_()
                values = ctx.value(states, part)
            found = torch.autograd.grad(values, [states, *ctx.learned], upstream[part], allow_unused=True)
            dhidden[part] = 0 if found[0] is None else found[0][0]
            for so_far, own in zip(sums, found[1:], strict=True):
                if own is not None:
                    so_far += own
        gradients = [total.to(weight.dtype) for total, weight in zip(sums, ctx.learned, strict=True)]
        return dhidden.view(hidden.shape), None, None, *gradients


def _parts(tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]
