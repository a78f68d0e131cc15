"""Attention over a group as one operator for autograd, `torch.compile`, FSDP2 and selective checkpointing.

`torch.ops.hf_burst.attention` returns `(out, lse, kept)`, all saved for the backward pass, which is the operator
`torch.ops.hf_burst.attention_backward`. `kept` holds the exchanged q, k and v if heads are exchanged. The request
enters as plain numbers and the layout as a small CPU tensor, so that a new packing is a new input, not a new graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import KernelError
from ..kernels import Gradients
from ..numerics import accumulation_dtype, refuse_second_derivative
from ..ring import HeadSizes, kept_shapes, row_products
from ..ring.merge import heads_first
from ..ring.resources import resources_of
from .choice import schedule_of
from .prepare import sharded_attention
from .request import SCHEMA, AttentionRequest, Flat, InputKind

# `out`, `lse` and `kept`
Results = tuple[Tensor, Tensor, list[Tensor]]
# Returns the operator's saved results for q, k, v, sinks and the encoded layout.
Recall = Callable[..., Results] | None

_before = globals().get("_library")
if _before is not None:  # the module is reloaded, as in notebooks
    _before._destroy()
_library = torch.library.Library("hf_burst", "DEF")  # calls through torch.library.custom_op are far slower on the host
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor layout, {SCHEMA}) -> (Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor[] inputs, Tensor out, Tensor lse, int kv_heads, "
    f"int head_dim, Tensor layout, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Tensor, *flat: Any) -> Results:
    """Computes the operator; see [`burst_attention`] for its tensors, [`AttentionRequest.flatten`] for the rest."""
    *_, transport, group = flat
    resources = resources_of(group)
    attention, later = sharded_attention(resources, flat, layout, InputKind.of(q, k, v))
    with resources.messages(q.device, transport, attention.near_ranks) as exchanges:
        out, lse, kept = attention.forward(exchanges, q, k, v, sinks)
    if later is not None:
        rows = later.rows(q, k, v)
        with resources.messages(q.device, "p2p") as exchanges:  # for the few blocks that ranks cut
            later.merge_(exchanges, rows, out, lse)
        kept = [*kept, *rows] if kept else []  # unknown to the fake operator: blocks are never compiled
    return out, lse, kept


@torch.library.register_fake("hf_burst::attention", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Tensor, *flat: Any) -> Results:
    request, inputs = AttentionRequest.restore(flat), InputKind.of(q, k, v)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = heads_first(q.shape, accumulation_dtype(q.dtype), q.device)
    schedule = schedule_of(request, inputs)
    kept = kept_shapes(
        schedule, inputs.batch, inputs.tokens, inputs.sizes, q.device.type == "cuda", request.head_groups
    )
    return out, lse, [q.new_empty(shape) for shape in kept]


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    inputs: list[Tensor],
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    head_dim: int,
    layout: Tensor,
    *flat: Any,
) -> Gradients:
    """Returns the gradients of `hf_burst::attention` for q, k and v; the sinks' gradient is computed separately.

    `inputs` are q, k and v, or the tensors in `kept` from the forward pass.
    """
    *_, transport, group = flat
    (batch, tokens, q_heads, value_dim), resources, device = dout.shape, resources_of(group), dout.device
    sizes = HeadSizes(q_heads, kv_heads, head_dim, value_dim)
    kind = InputKind(sizes, batch, tokens, dout.dtype, device)
    attention, later = sharded_attention(resources, flat, layout, kind)
    rows = [] if later is None else later.rows(*inputs) if len(inputs) == 3 else inputs[-3:]
    own_out = out if dlse is None else None
    delta = row_products(dout, out, dlse) if attention.needs_delta or own_out is None else None
    with resources.messages(device, transport, attention.near_ranks) as exchanges:
        own_inputs = inputs[:-3] if later is not None and len(inputs) > 3 else inputs
        gradients = attention.backward(exchanges, sizes, own_inputs, dout, own_out, lse, delta)
    if later is not None:
        with resources.messages(device, "p2p") as exchanges:
            later.add_gradients_(exchanges, rows, (dout, own_out, lse, delta), gradients)
    return gradients


@torch.library.register_fake("hf_burst::attention_backward", lib=_library)
def _(
    dout: Tensor, dlse: Any, inputs: Any, out: Tensor, lse: Tensor, kv_heads: int, head_dim: int, *rest: Any
) -> Gradients:
    (batch, tokens), sizes = dout.shape[:2], HeadSizes(dout.shape[2], kv_heads, head_dim, dout.shape[3])
    q_shape, k_shape, v_shape = sizes.shapes(batch, tokens, tokens)
    return dout.new_empty(q_shape), dout.new_empty(k_shape), dout.new_empty(v_shape)


class TrackedAttention(torch.autograd.Function):
    """The autograd function of the operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Tensor, flat: Flat, recall: Recall
    ) -> Results:
        with torch._C._AutoDispatchBelowAutograd():
            if recall is None:
                out, lse, kept = torch.ops.hf_burst.attention(q, k, v, sinks, layout, *flat)
            else:
                with _disable_current_modes():  # selective checkpointing expects the first run's calls
                    out, lse, kept = recall(q, k, v, sinks, layout)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, layout, out, lse, *(kept or (q, k, v)))
        ctx.sizes = k.shape[2], k.shape[3]
        ctx.flat = flat
        return out, lse, kept

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dkept: Any) -> Any:
        refuse_second_derivative()
        sinks, layout, out, lse, *inputs = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if dlse is not None and out.dtype == torch.float16:
            raise KernelError(
                "A gradient into lse in torch.float16 overflows on its way into flash kernels. Use bfloat16, or detach "
                "lse."
            )
        gradients = torch.ops.hf_burst.attention_backward(dout, dlse, inputs, out, lse, *ctx.sizes, layout, *ctx.flat)
        dsinks = _sink_gradient(sinks, dout, out, lse, dlse) if ctx.needs_input_grad[3] else None
        return *gradients, dsinks, None, None, None


@torch.library.impl(_library, "attention", "Autograd")
@torch.compiler.disable
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: Tensor, *flat: Any) -> Any:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (q, k, v, sinks)):
        return TrackedAttention.apply(q, k, v, sinks, layout, flat, None)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.hf_burst.attention(q, k, v, sinks, layout, *flat)


def _sink_gradient(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns the sinks' gradient: each row's probability of its sink times `-delta`, because the sink's value is 0."""
    delta = row_products(dout, out, dlse)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)
