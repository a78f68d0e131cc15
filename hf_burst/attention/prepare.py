"""Makes the [`ShardedAttention`] for a request, once for each kind of input."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import Kernel, KernelRequest, select_kernel
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from ..ring import ShardedAttention
from ..ring.resources import GroupResources
from .choice import schedule_of
from .later import LaterAttention
from .request import AttentionRequest, Flat, InputKind


def sharded_attention(
    resources: GroupResources, flat: Flat, encoded: Tensor, inputs: InputKind
) -> tuple[ShardedAttention, LaterAttention | None]:
    """Returns the attention of a request, and what a layout's blocks add to it; equal requests in all layers and steps
    share both.

    Args:
        resources ([`GroupResources`]): The group's resources.
        flat (`tuple`): The request, see [`AttentionRequest.flatten`].
        encoded (`torch.Tensor`): The layout, see [`SequenceLayout.encode`].
        inputs ([`InputKind`]): The kind of q, k and v.
    """
    per_host = resources.ranks_per_host(inputs.device)
    return _prepared(resources.group, flat, encoded.numpy().tobytes(), inputs, deterministic(), per_host)


@lru_cache(maxsize=64)
def _prepared(
    group: ContextGroup, flat: Flat, encoded: bytes, inputs: InputKind, same_bits: bool, ranks_per_host: int
) -> tuple[ShardedAttention, LaterAttention | None]:
    request, layout = AttentionRequest.restore(flat), SequenceLayout.decode(encoded)
    assert request.scores is not None, "with_scale sets them"
    attention = ShardedAttention(
        schedule=schedule_of(request, inputs),
        group=group,
        masks=layout.masks(request.pattern),
        queries=layout.sharding,
        keys=layout.sharding,
        kernel=kernel_for(request, inputs, request.pattern.window is not None, same_bits),
        scores=request.scores,
        on_gpus=inputs.device.type == "cuda",
        head_groups=request.head_groups,
        ranks_per_host=ranks_per_host,
    )
    plan = layout.later_keys
    if plan is None:
        return attention, None
    of_blocks = replace(
        attention,
        schedule=Schedule("kv_ring"),
        masks=(plan.mask,),
        queries=plan.queries,
        keys=plan.keys,
        kernel=kernel_for(request, inputs, windowed=False, same_bits=same_bits),
        head_groups=1,
        ranks_per_host=None,
    )
    return attention, LaterAttention(of_blocks, plan)


def kernel_for(request: AttentionRequest, inputs: InputKind, windowed: bool, same_bits: bool) -> Kernel:
    """Selects the kernel for a request's tiles: `windowed` if their bands differ from those of causal squares,
    `same_bits` if two runs must agree bitwise."""
    wanted = KernelRequest(
        device=inputs.device.type,
        dtype=inputs.dtype,
        head_dim=inputs.sizes.head_dim,
        value_dim=inputs.sizes.value_dim,
        softcap=request.scores is not None and request.scores.softcap > 0,
        deterministic=same_bits,
        window=windowed,
    )
    return select_kernel(request.kernel, wanted)


def deterministic() -> bool:
    """Whether torch is set to use deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
