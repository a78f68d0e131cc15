"""The choice of a schedule: the one of the config, or for `"auto"` the one that `hf_burst.plan.choose` names."""

import logging
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..errors import ConfigError
from ..numerics import accumulation_dtype
from ..plan import Layer, Machine, Shapes, assign, choose, cut, name_of
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from ..ring import HeadSizes
from ..ring.resources import resources_of
from .request import AttentionRequest

logger = logging.getLogger(__name__)


def machine_of_group(request: AttentionRequest, device: torch.device) -> Machine | None:
    """The machine that the group of a request runs on, see [`GroupResources.machine`]; `None` for one process.

    The ranks agree on it at the first call, which all of them make at the same time and not while they trace a graph.
    """
    if request.group.size == 1:
        return None
    return resources_of(request.group).machine(device, request.kernel, request.ranks_per_host)


def with_schedule(
    request: AttentionRequest, layout: SequenceLayout, q: Tensor, k: Tensor, v: Tensor
) -> AttentionRequest:
    """The request with the schedule for the documents of this batch.

    While a graph is compiled it stays `"auto"`, since the graph is to serve other batches too: the operator then goes
    by one whole document.

    Args:
        request, layout, q, k, v: As in [`burst_attention`].
    """
    if request.schedule != "auto" or torch.compiler.is_compiling():
        return request
    machine = machine_of_group(request, q.device)
    if machine is None:
        return request
    return _with_choice(request, layout, shapes_of(HeadSizes.of(q, k, v), q.dtype), machine)


@lru_cache(maxsize=64)
def _with_choice(
    request: AttentionRequest, layout: SequenceLayout, shapes: Shapes, machine: Machine
) -> AttentionRequest:
    layer = Layer(layout.masks(request.pattern), layout.sharding, shapes)
    return replace(request, schedule=name_of(_chosen(layer, machine, request.group), request.group.size))


def schedule_of(
    request: AttentionRequest, sizes: HeadSizes, batch: int, tokens: int, dtype: torch.dtype, machine: Machine | None
) -> Schedule:
    """The schedule that the operator executes; for `"auto"` that of one whole document of this length.

    Args:
        request ([`AttentionRequest`]): What was asked for.
        sizes ([`HeadSizes`]): Heads of q, k and v.
        batch, tokens (`int`): Rows of the batch, and tokens of a rank.
        dtype (`torch.dtype`): Of q, k and v.
        machine ([`Machine`], *optional*): On what the group runs; `None` for one process.

    Raises:
        ConfigError: If the ranks cannot execute the schedule asked for with these heads.
    """
    group = request.group
    if request.schedule != "auto":
        return named_schedule(request.schedule, sizes, group.size)
    if machine is None:
        return Schedule()
    length = int(tokens) * group.size
    masks = (request.pattern.mask(length, (0, length)),) * int(batch)
    sharding = cut(length, assign(masks, group.size))
    return _chosen(Layer(masks, sharding, shapes_of(sizes, dtype)), machine, group)


def shapes_of(sizes: HeadSizes, dtype: torch.dtype) -> Shapes:
    """Heads and bytes as plans count them."""
    return Shapes(*sizes, dtype.itemsize, accumulation_dtype(dtype).itemsize)


def named_schedule(name: str, sizes: HeadSizes, ranks: int) -> Schedule:
    """The schedule of a name, as in [`BurstConfig`] but not `"auto"`.

    Raises:
        ConfigError: If so many ranks cannot execute it with so many heads.
    """
    schedule = Schedule.parse(name, ranks)
    refusal = schedule.refusal(ranks, sizes.q_heads, sizes.kv_heads)
    if refusal is not None:
        raise ConfigError(
            f"The schedule {name!r} cannot be had: {refusal}. Take one that can (BurstConfig(schedule='auto') "
            "does), or another number of ranks."
        )
    return schedule


@lru_cache(maxsize=64)
def _chosen(layer: Layer, machine: Machine, group: ContextGroup) -> Schedule:
    """The choice. Rank 0 logs it, quietly for packed documents, as there is one for every batch."""
    choice, masks = choose(layer, machine), layer.masks
    if group.rank == 0:
        documents = sum(len(mask.documents) - 1 for mask in masks)
        level = logging.INFO if documents == len(masks) else logging.DEBUG
        heads = f"{layer.shapes.q_heads} query and {layer.shapes.kv_heads} key heads"
        batch = f"{len(masks)} x {masks[0].length} tokens, {heads}"
        name = name_of(choice.schedule, group.size)
        logger.log(level, "hf_burst runs %s for %s, documents: %d (%s)", name, batch, documents, choice.reason)
    return choice.schedule
