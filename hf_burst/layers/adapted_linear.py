"""A frozen linear layer with a low-rank adapter (LoRA, arXiv 2106.09685): y = x W' + b + s (x A') B'.

Library code scales the adapter's product and adds it in separate passes over the widest tensors of a layer. Here the
products accumulate in place. The backward pass needs x and x A', which are saved before anything else is computed, so
that a checkpoint can stop recomputing there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ..numerics import accumulation_dtype, refuse_second_derivative
from .graph import Kept


def adapted_linear(
    tensor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scaling: float,
    dropped: Tensor | None = None,
    skipped: bool = False,
) -> Tensor:
    """Computes a linear layer and its adapter.

    Autocast casts all factors as it does for linear layers. Gradients of the adapter are rounded once, to its dtype.

    Args:
        tensor (`torch.Tensor` of shape `(..., n, in_features)`): x.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): W, which gets no gradient; or a `Params4bit` of
            bitsandbytes, which each pass dequantizes.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): b, which gets no gradient either.
        down (`torch.Tensor` of shape `(rank, in_features)`): A.
        up (`torch.Tensor` of shape `(out_features, rank)`): B.
        scaling (`float`): s.
        dropped (`torch.Tensor` of shape `(..., n, in_features)`, *optional*): The adapter's input, if not x.
        skipped (`bool`, defaults to `False`): Whether to leave the result uncomputed, because nobody reads it.

    Returns:
        `torch.Tensor` of shape `(..., n, out_features)`.
    """
    tensors = (tensor, weight, bias, down, up, dropped)
    if has_torch_function(tensors):
        return handle_torch_function(
            adapted_linear, tensors, tensor, weight, bias, down, up, scaling, dropped=dropped, skipped=skipped
        )
    dtype = autocast_dtype(tensor, weight) or tensor.dtype
    tensor, dropped = tensor.to(dtype), None if dropped is None else dropped.to(dtype)
    state = getattr(weight, "quant_state", None)  # of a 4-bit weight of bitsandbytes
    frozen = _of_4_bits(weight.detach(), state).to(dtype)
    base = frozen, None if bias is None else bias.detach().to(dtype)
    with torch.no_grad():
        inner = functional.linear(tensor if dropped is None else dropped, down.to(dtype))
    learn = torch.is_grad_enabled() and any(
        factor is not None and factor.requires_grad for factor in (tensor, dropped, down, up)
    )
    if not learn:
        return _product(tensor, base, inner, up.to(dtype), scaling)
    factors = (factor.detach().to(dtype) for factor in (down, up))
    given = tensor if dropped is None else dropped, inner, *factors, frozen if state is None else weight.detach()
    saved, *_ = Kept.apply(given, tensor, down, up, *(() if dropped is None else (dropped,)))
    call = _Call(saved.grad_fn, state, tensor.requires_grad, dropped is not None, scaling, skipped)
    return _AdaptedLinear.apply(call, saved, dropped, down, up, inner, base)


def autocast_dtype(tensor: Tensor, weight: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast gives a linear layer's factors, or `None` if it casts nothing."""
    kind = tensor.device.type
    casts = torch.is_autocast_enabled(kind) and torch.float64 not in (weight.dtype, tensor.dtype)
    return torch.get_autocast_dtype(kind) if casts else None


def _of_4_bits(weight: Tensor, state: Any) -> Tensor:
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, state)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns a matrix product in the accumulation dtype. Autocast must be off, because it would round the product."""
    dtype = accumulation_dtype(left.dtype)
    if left.dtype == dtype or left.device.type != "cuda":  # products on other devices have their factors' dtype
        return left.to(dtype) @ right.to(dtype)
    return torch.mm(left, right, out_dtype=dtype)


def _product(
    tensor: Tensor, base: tuple[Tensor, Tensor | None], inner: Tensor, up: Tensor, scaling: float, skipped: bool = False
) -> Tensor:
    weight, bias = base
    out = tensor.new_empty(*tensor.shape[:-1], len(weight))  # not a view, so that it can be changed in place
    if skipped:
        return out
    rows = out.view(-1, len(weight))
    of_adapter = {"beta": 0, "alpha": scaling} if bias is None else {"alpha": scaling}
    torch.addmm(rows if bias is None else bias, inner.flatten(0, -2), up.T, **of_adapter, out=rows)
    # The large product comes last: it accumulates while it computes, but the small one would be bound by memory.
    rows.addmm_(tensor.flatten(0, -2), weight.T)
    return out


class _Call(NamedTuple):
    """The non-tensor state of one call."""

    saved: Any  # the autograd node that saved the backward pass's tensors
    state: Any  # quantization state of a 4-bit weight
    learns: bool  # whether x needs a gradient
    drops: bool  # whether the adapter's input is not x
    scaling: float
    skipped: bool


class _AdaptedLinear(torch.autograd.Function):
    """The product of the factors saved by a [`Kept`] node."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        tensor: Tensor,
        dropped: Tensor | None,
        down: Tensor,
        up: Tensor,
        inner: Tensor,
        base: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        ctx.call, ctx.dtypes = call, (down.dtype, up.dtype)
        return _product(tensor, base, inner, up.to(inner.dtype), call.scaling, call.skipped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        with torch.autocast(gradient.device.type, enabled=False):
            return None, *_gradients(ctx.call, gradient, ctx.needs_input_grad[2:5], ctx.dtypes), None, None


def _gradients(
    call: _Call, gradient: Tensor, learn: tuple[bool, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> list[Tensor | None]:
    """Returns the gradients of x, of the adapter's separate input, and of A and B."""
    given, inner, down, up, weight = call.saved.saved_tensors
    of_dropped, of_down, of_up = learn
    rows = gradient.flatten(0, -2)
    d_inner = rows.new_empty(len(rows), len(down)).addmm_(rows, up, beta=0, alpha=call.scaling)
    d_up = call.scaling * wide_product(rows.T, inner.flatten(0, -2)) if of_up else None
    d_down = wide_product(d_inner.T, given.flatten(0, -2)) if of_down else None
    d_dropped = d_inner @ down if of_dropped else None
    d_tensor = None
    if call.learns:
        factors = rows, _of_4_bits(weight, call.state).to(rows.dtype)
        d_tensor = rows @ factors[1] if call.drops else (d_inner @ down).addmm_(*factors)
    parts = [None if part is None else part.to(dtype) for part, dtype in zip((d_down, d_up), dtypes, strict=True)]
    shape = gradient.shape[:-1]
    return [*(None if part is None else part.view(*shape, part.shape[-1]) for part in (d_tensor, d_dropped)), *parts]
