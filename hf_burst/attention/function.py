"""`burst_attention`, the public function, with its checks, and `attend`, which models call too."""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BatchError, KernelError, ShardingError
from ..ranks.group import Agreement, ContextGroup, group_by_name
from ..ranks.layout import SequenceLayout
from ..ring.resources import resources_of
from .cache import AttentionCache
from .choice import schedule_of, with_schedule
from .prepare import deterministic, kernel_for
from .request import AttentionRequest, InputKind


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    request: AttentionRequest,
    *,
    sinks: Tensor | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes exact attention over a sequence sharded over the ranks of a group (BurstAttention, arXiv 2403.09347).

    Args:
        q (`torch.Tensor` of shape `(batch, n, q_heads, head_dim)`): This rank's queries, `n = layout.length / ranks`.
        k (`torch.Tensor` of shape `(batch, n, kv_heads, head_dim)`): This rank's keys; `kv_heads` divides `q_heads`.
        v (`torch.Tensor` of shape `(batch, n, kv_heads, value_dim)`): This rank's values.
        layout ([`SequenceLayout`]): The layout of the batch over the ranks; equal on all of them.
        request ([`AttentionRequest`]): The ranks, the mask pattern, the scores, kernel, schedule and transport.
        sinks (`torch.Tensor` of shape `(q_heads,)`, *optional*): An additional score of every row, with value 0.
        check (`bool`, defaults to `True`): Whether the ranks compare what they are about to compute, by one small
            all-gather. Without it, inputs that differ between ranks hang the job.

    Returns:
        `out` of shape `(batch, n, q_heads, value_dim)` in the dtype of q, and `lse` of shape `(batch, n, q_heads)` in
        fp32 (fp64 for fp64), the log-sum-exp of each row's scores, including its sink's.

    Raises:
        BurstError: If inputs are wrong, on every rank (with `check`) and before anything is sent.

    Example:

    ```python
    >>> request = AttentionRequest(ContextGroup.from_mesh(None), MaskPattern(window=4095))
    >>> out, lse = burst_attention(q, k, v, SequenceLayout.for_batch([(0, 131072)], ranks=8), request)
    ```
    """
    if not isinstance(request, AttentionRequest):
        raise BatchError(f"Attention takes an AttentionRequest behind the layout, got {type(request).__name__}.")
    comparing = request.group.agreeing(_device_of(q, request.group), "burst_attention")
    with comparing if check else nullcontext(Agreement()) as found:
        _check(q, k, v, layout, request, sinks)
        found.facts |= _facts(q, k, v, layout, request.with_scale(q.shape[-1]), sinks)
    if check:
        resources_of(request.group).ranks_per_host(q.device)
    request = with_schedule(request.with_scale(q.shape[-1]), layout, q, k, v)
    out, lse, _ = torch.ops.hf_burst.attention(q, k, v, sinks, layout.encode(), *request.flatten())
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: SequenceLayout,
    encoded: Tensor,
    request: AttentionRequest,
    cache: AttentionCache | None = None,
) -> Tensor:
    """Returns the attention output of inputs that the ranks have agreed on, as in [`burst_attention`].

    Args:
        q, k, v, sinks, layout, request: As in [`burst_attention`]; the request's scores must be set.
        encoded (`torch.Tensor`): The layout, see [`SequenceLayout.encode`].
        cache ([`AttentionCache`], *optional*): The cache of the running checkpointed layer.
    """
    request = with_schedule(request, layout, q, k, v)
    if cache is not None:
        return cache.attention(q, k, v, sinks, encoded, request)
    return torch.ops.hf_burst.attention(q, k, v, sinks, encoded, *request.flatten())[0]


def _facts(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, request: AttentionRequest, sinks: Tensor | None
) -> dict[str, Any]:
    """Returns the facts that must be equal on all ranks. Raises for an impossible mask, schedule or kernel."""
    layout.masks(request.pattern)
    layout.encode()
    inputs = InputKind.of(q, k, v)
    if request.schedule != "auto":
        schedule_of(request, inputs)  # raises if it is impossible
    kernel = kernel_for(request, inputs, request.pattern.window is not None, deterministic())
    return {
        "shapes of q, k, v": [list(tensor.shape) for tensor in (q, k, v)],
        "dtype": str(q.dtype),
        "layout": str(layout),
        "mask pattern": str(request.pattern),
        "scores": str(request.scores),
        "sinks": sinks is not None,
        "kernel": [request.kernel, kernel.capabilities.name],
        "schedule": str(request.schedule),
        "transport": request.transport,
        "head_groups": request.head_groups,
        "gradients": torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)),
    }


def _device_of(q: Any, group: ContextGroup) -> torch.device:
    """Returns the device for communication: that of the queries, or the backend's if they are not a usable tensor."""
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda"):
        return q.device
    on_gpus = group.size > 1 and dist.get_backend(group_by_name(group.name)) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, request: AttentionRequest, sinks: Tensor | None
) -> None:
    """Raises an error if the inputs of this rank do not fit each other or the group."""
    if not all(isinstance(tensor, Tensor) for tensor in (q, k, v)) or not isinstance(layout, SequenceLayout):
        kinds = ", ".join(type(value).__name__ for value in (q, k, v, layout))
        raise BatchError(f"Attention takes three tensors and a SequenceLayout, got {kinds}.")
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip("qkv", (q, k, v), strict=True))
    fit = q.ndim == k.ndim == v.ndim == 4 and 0 not in (*q.shape, *v.shape) and q.shape[:2] == k.shape[:2]
    if not fit or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise BatchError(
            f"q, k and v do not belong together: {shapes}. They are (batch, tokens, heads, head size), and must agree "
            "but for their heads."
        )
    places = [f"{tensor.dtype} on {tensor.device}" for tensor in (q, k, v)]
    size, softcap = request.pattern.attention_chunk_size, 0.0 if request.scores is None else request.scores.softcap
    groups, blocks = request.head_groups, layout.blocks
    of_sinks = (q.shape[2:3], q.device) if sinks is None else (sinks.shape, sinks.device)
    BatchError.refuse(
        (len({*places}) > 1, f"q, k and v need one dtype and one device, got {', '.join(places)}."),
        (
            (size is not None and size < 1) or type(groups) is not int or groups < 1 or not 0 <= softcap < math.inf,
            f"attention_chunk_size is {size} (allowed: at least 1, or None), head_groups {groups!r} (at least 1), and "
            f"softcap is {softcap} (a positive number, or 0 for none).",
        ),
        (
            of_sinks != (q.shape[2:3], q.device),
            f"sinks are of shape {tuple(of_sinks[0])} on {of_sinks[1]}; give a score a query head, ({q.shape[2]},), on "
            f"{q.device}.",
        ),
        (
            blocks and not (request.pattern.causal and _in_order(layout)),
            f"The blocks {str(blocks)[:80]} do not fit: they are for causal attention, and for each of "
            f"{layout.batch_size} rows of {layout.length} tokens they are pairs (start, stop) in rising order.",
        ),
    )
    if q.shape[2] % k.shape[2]:
        raise KernelError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads: it must be a whole multiple.")
    _check_layout(q, layout, request.group)


def _in_order(layout: SequenceLayout) -> bool:
    """Returns whether the blocks of each row rise, within its tokens."""
    tokens = [[0, *(token for block in row for token in block), layout.length] for row in layout.blocks]
    return len(tokens) == layout.batch_size and all(row == sorted(row) for row in tokens)


def _check_layout(q: Tensor, layout: SequenceLayout, group: ContextGroup) -> None:
    """Raises a ShardingError if the layout does not match the queries or the group."""
    if layout.ranks != group.size:
        raise ShardingError(
            f"The layout is for {layout.ranks} ranks, the group has {group.size}. Shard the batch for the group that "
            "the attention runs on."
        )
    sizes = {layout.sharding.tokens(rank) for rank in range(layout.ranks)}
    shape = layout.batch_size, layout.sharding.tokens(group.rank)
    ShardingError.refuse(
        (
            (not layout.boundaries and layout.length % len(layout.owners))
            or len(sizes) > 1
            or layout.sharding.stop != layout.length,
            f"The layout has {layout.length} tokens in chunks with owners {layout.owners}, which are not equal, not as "
            "many for every rank, or end elsewhere. Make it by SequenceLayout.for_batch, which pads.",
        ),
        (
            q.shape[:2] != shape,
            f"Rank {group.rank} of {group.size} should hold {shape[0]} x {shape[1]} tokens, q has {q.shape[0]} x "
            f"{q.shape[1]}. Shard the batch with hf_burst.shard_batch.",
        ),
    )
