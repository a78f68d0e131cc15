"""The choice of a schedule: the one of the config, or for `"auto"` the one that `hf_burst.plan.choose` names."""

import logging
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..errors import ConfigError
from ..layout import SequenceLayout
from ..mesh import ContextGroup
from ..plan import Machine, Mask, Sharding, assign, choose, cut, name_of
from ..resources import resources_of
from ..ring import HeadSizes
from .request import AttentionRequest

logger = logging.getLogger(__name__)


def machine_of_group(group: ContextGroup, device: torch.device, kernel: str) -> Machine | None:
    """The machine that a group runs on, see [`GroupResources.machine`]; `None` for one process.

    The ranks agree on it at the first call, which all of them make at the same time and not while they trace a graph.
    """
    return None if group.size == 1 else resources_of(group).machine(device, kernel)


def with_schedule(request: AttentionRequest, layout: SequenceLayout, q: Tensor, k: Tensor) -> AttentionRequest:
    """The request with the schedule for the documents of this batch.

    While a graph is compiled it stays `"auto"`, since the graph is to serve other batches too: the operator then goes
    by one whole document.

    Args:
        request, layout, q, k: As in [`burst_attention`].
    """
    if request.schedule != "auto" or request.group.size == 1 or torch.compiler.is_compiling():
        return request
    machine = resources_of(request.group).machine(q.device, request.kernel)
    return _with_choice(request, layout, int(q.shape[2]), int(k.shape[2]), machine.ranks_per_host)


@lru_cache(maxsize=64)
def _with_choice(
    request: AttentionRequest, layout: SequenceLayout, q_heads: int, kv_heads: int, ranks_per_host: int
) -> AttentionRequest:
    masks, group = layout.masks(request.pattern), request.group
    schedule = _chosen(masks, layout.sharding, q_heads, kv_heads, ranks_per_host, group)
    return replace(request, schedule=name_of(schedule, group.size))


def schedule_of(request: AttentionRequest, sizes: HeadSizes, batch: int, tokens: int, ranks_per_host: int) -> Schedule:
    """The schedule that the operator executes; for `"auto"` that of one whole document of this length.

    Args:
        request ([`AttentionRequest`]): What was asked for.
        sizes ([`HeadSizes`]): Heads of q, k and v.
        batch, tokens (`int`): Rows of the batch, and tokens of a rank.
        ranks_per_host (`int`): As in [`Machine`].

    Raises:
        ConfigError: If the ranks cannot execute the schedule asked for with these heads.
    """
    group = request.group
    if request.schedule != "auto":
        return named_schedule(request.schedule, sizes, group.size)
    if group.size == 1:
        return Schedule()
    length = int(tokens) * group.size
    masks = (request.pattern.mask(length, (0, length)),) * int(batch)
    sharding = cut(length, assign(masks, group.size))
    return _chosen(masks, sharding, sizes.q_heads, sizes.kv_heads, ranks_per_host, group)


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
def _chosen(
    masks: tuple[Mask, ...], sharding: Sharding, q_heads: int, kv_heads: int, ranks_per_host: int, group: ContextGroup
) -> Schedule:
    """The choice. Rank 0 logs it, quietly for packed documents, as there is one for every batch."""
    choice = choose(masks, sharding, q_heads, kv_heads, ranks_per_host)
    if group.rank == 0:
        documents = sum(len(mask.documents) - 1 for mask in masks)
        level = logging.INFO if documents == len(masks) else logging.DEBUG
        batch = f"{len(masks)} x {masks[0].length} tokens, {q_heads} query and {kv_heads} key heads"
        name = name_of(choice.schedule, group.size)
        logger.log(level, "hf_burst runs %s for %s, documents: %d (%s)", name, batch, documents, choice.reason)
    return choice.schedule
