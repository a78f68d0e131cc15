"""From a request to the [`ShardedAttention`] that carries it out: made once for a kind of input."""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..kernels import Kernel, KernelRequest, select_kernel
from ..layout import SequenceLayout
from ..plan import Machine
from ..ring import HeadSizes, ShardedAttention
from .choice import machine_of_group, schedule_of
from .request import AttentionRequest


class InputKind(NamedTuple):
    """Shapes, dtype and device of this rank's q, k and v.

    Args:
        sizes ([`HeadSizes`]): Heads.
        batch (`int`): Rows of the batch.
        tokens (`int`): Tokens of this rank.
        dtype (`torch.dtype`): Of all three.
        device (`torch.device`): Where they lie.
    """

    sizes: HeadSizes
    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device


def head_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> HeadSizes:
    """The heads of q, k and v, also of fake tensors, whose heads are never symbols."""
    return HeadSizes(int(q.shape[2]), int(k.shape[2]), int(q.shape[3]), int(v.shape[3]))


def sharded_attention(request: AttentionRequest, encoded: torch.Tensor, inputs: InputKind) -> ShardedAttention:
    """The attention of a request; one object for all layers and steps that ask for the same.

    Args:
        request ([`AttentionRequest`]): What it is.
        encoded (`torch.Tensor`): The layout, see [`SequenceLayout.encode`].
        inputs ([`InputKind`]): What it is given.
    """
    machine = machine_of_group(request.group, inputs.device, request.kernel)
    return _prepared(request, encoded.numpy().tobytes(), inputs, deterministic(), machine)


@lru_cache(maxsize=64)
def _prepared(
    request: AttentionRequest, encoded: bytes, inputs: InputKind, same_bits: bool, machine: Machine | None
) -> ShardedAttention:
    assert request.scores is not None, "with_scale sets them"
    layout = SequenceLayout.decode(encoded)
    schedule = schedule_of(request, inputs.sizes, inputs.batch, inputs.tokens, machine)
    windowed = request.pattern.window is not None or schedule.ring == "all_gather"
    return ShardedAttention(
        schedule=schedule,
        group=request.group,
        masks=layout.masks(request.pattern),
        queries=layout.sharding,
        keys=layout.sharding,
        kernel=kernel_for(request, inputs.sizes, inputs.dtype, inputs.device, windowed, same_bits),
        scores=request.scores,
        slice_blocks=0 if machine is None else machine.slice_blocks,
    )


def kernel_for(
    request: AttentionRequest,
    sizes: HeadSizes,
    dtype: torch.dtype,
    device: torch.device,
    windowed: bool,
    same_bits: bool,
) -> Kernel:
    """The kernel that computes the tiles of a request.

    Args:
        request ([`AttentionRequest`]): What is computed.
        sizes ([`HeadSizes`]): Heads of q, k and v.
        dtype (`torch.dtype`): Of q, k and v.
        device (`torch.device`): Where they lie.
        windowed (`bool`): Whether tiles have other bands than those of causal squares.
        same_bits (`bool`): Whether two runs must give the same bits.
    """
    softcap = request.scores is not None and request.scores.softcap > 0
    wanted = KernelRequest(
        device=device.type,
        dtype=dtype,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        softcap=softcap,
        deterministic=same_bits,
        window=windowed,
    )
    return select_kernel(request.kernel, wanted)


def deterministic() -> bool:
    """Whether torch is told to give the same bits each time."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
