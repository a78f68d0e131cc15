"""One differentiable number per token, computed from its scores, some tokens at a time.

Unlike a sum (`linear_loss.py`), the forward pass does not know the upstream gradient of each token. So the scores are
computed once for the values and again in the backward pass. Gradients are summed in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..numerics import refuse_second_derivative
from .by_parts import gradients_by_parts, parts_of

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
        return torch.cat([value(flat[None, part], part) for part in parts_of(len(flat), rows)]).view(hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_second_derivative()
        (hidden,), upstream, value = ctx.saved_tensors, gradient.flatten(), ctx.value
        flat = hidden.detach().flatten(0, -2)
        dhidden, *found = gradients_by_parts(
            flat, ctx.rows, lambda states, part: (value(states, part), upstream[part]), ctx.learned
        )
        return dhidden.view(hidden.shape), None, None, *found
