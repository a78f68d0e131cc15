"""Makes the [`ShardedAttention`] for a request, once for each kind of input."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import Schedule
from ..kernels import Kernel, KernelRequest, select_kernel
from ..ranks.group import ContextGroup
from ..ranks.host import Topology
from ..ranks.layout import SequenceLayout
from ..ring import HeadSizes, ShardedAttention
from ..ring.resources import GroupResources
from .choice import schedule_of
from .later import LaterAttention
from .request import AttentionRequest, Flat


class InputKind(NamedTuple):
    """Heads, batch rows, tokens of this rank, dtype and device of q, k and v."""

    sizes: HeadSizes
    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "InputKind":
        """Makes the kind of these tensors."""
        return cls(HeadSizes.of(q, k, v), q.shape[0], q.shape[1], q.dtype, q.device)


def sharded_attention(resources: GroupResources, flat: Flat, encoded: Tensor, inputs: InputKind) -> ShardedAttention:
    """Returns the attention of a request; equal requests in all layers and steps share one object.

    Args:
        resources ([`GroupResources`]): The group's resources.
        flat (`tuple`): The request, see [`AttentionRequest.flatten`].
        encoded (`torch.Tensor`): The layout, see [`SequenceLayout.encode`].
        inputs ([`InputKind`]): The kind of q, k and v.
    """
    *_, per_host, _, _, _, _ = flat
    topology = resources.topology(inputs.device, per_host or None)
    return _prepared(resources.group, flat, encoded.numpy().tobytes(), inputs, deterministic(), topology)


def later_attention(
    attention: ShardedAttention, flat: Flat, encoded: Tensor, inputs: InputKind
) -> LaterAttention | None:
    """Returns the attention that a layout's blocks add to causal attention, or `None` without blocks.

    Args:
        attention ([`ShardedAttention`]): The causal attention.
        flat, encoded, inputs: As in [`sharded_attention`].
    """
    return _later(attention, flat, encoded.numpy().tobytes(), inputs, deterministic())


@lru_cache(maxsize=64)
def _later(
    attention: ShardedAttention, flat: Flat, layout: bytes, inputs: InputKind, same_bits: bool
) -> LaterAttention | None:
    plan = SequenceLayout.decode(layout).later_keys
    if plan is None:
        return None
    request = AttentionRequest.restore(flat)
    kernel = kernel_for(request, inputs, windowed=False, same_bits=same_bits)
    of_blocks = replace(
        attention,
        schedule=Schedule("kv_ring"),
        masks=(plan.mask,),
        queries=plan.queries,
        keys=plan.keys,
        kernel=kernel,
        head_groups=1,
        ranks_per_host=None,
    )
    return LaterAttention(of_blocks, plan)


@lru_cache(maxsize=64)
def _prepared(
    group: ContextGroup, flat: Flat, layout: bytes, inputs: InputKind, same_bits: bool, topology: Topology
) -> ShardedAttention:
    request, decoded = AttentionRequest.restore(flat), SequenceLayout.decode(layout)
    assert request.scores is not None, "with_scale sets them"
    schedule = schedule_of(request, inputs.sizes, inputs.batch, inputs.tokens, inputs.dtype, topology)
    return ShardedAttention(
        schedule=schedule,
        group=group,
        masks=decoded.masks(request.pattern),
        queries=decoded.sharding,
        keys=decoded.sharding,
        kernel=kernel_for(request, inputs, request.pattern.window is not None, same_bits),
        scores=request.scores,
        on_gpus=topology.on_gpus,
        head_groups=request.head_groups,
        ranks_per_host=topology.ranks_per_host,
    )


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
