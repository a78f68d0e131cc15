"""One number a token that follows from its scores, some tokens at a time, with a gradient.

Unlike a sum (`linear_loss.py`), single losses do not know in the forward pass what they will count. So the scores of
some tokens are computed once for the values, and once more in the backward pass; gradients are summed up in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype, refuse_second_derivative

# from hidden states of some tokens, `(1, m, hidden)`, and their places in the flattened batch, to values `(m,)`
Value = Callable[[Tensor, slice], Tensor]


def token_values(hidden: Tensor, value: Value, rows: int, learned: list[Tensor]) -> Tensor:
    """The value of each token, `(batch, n)`.

    Args:
        hidden (`torch.Tensor` of shape `(batch, n, hidden)`): What is scored.
        value (`Callable`): The values of some tokens. It is called once more in the backward pass.
        rows (`int`): Tokens at a time.
        learned (list of `torch.Tensor`): The parameters that `value` reads, to which gradients go.
    """
    values: Tensor = _TokenValues.apply(hidden, value, rows, *learned)
    return values


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
