"""The choice of a schedule: the one of the config, or for `"auto"` the one that `hf_burst.plan.choose` names."""

import logging
from dataclasses import replace
from functools import lru_cache

import torch

from ..config import Schedule
from ..errors import ConfigError
from ..layout import SequenceLayout
from ..mesh import ContextGroup
from ..plan import Machine, Mask, MaskPattern, Sharding, assign, choose, cut, name_of
from ..resources import resources_of
from ..ring import HeadSizes
from .request import AttentionRequest

logger = logging.getLogger(__name__)


def machine_of_group(group: ContextGroup, device: torch.device, kernel: str) -> Machine | None:
    """The machine that a group runs on; `None` for one process.

    The ranks agree on it at the first call, which all of them make at the same time and not while they trace a graph.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where this rank computes.
        kernel (`str`): As in [`BurstConfig`].
    """
    return None if group.size == 1 else resources_of(group).machine(device, kernel)


def with_schedule(
    request: AttentionRequest, layout: SequenceLayout, q: torch.Tensor, k: torch.Tensor
) -> AttentionRequest:
    """The request with the schedule for the documents of this batch.

    While a graph is compiled it stays `"auto"`, since the graph is to serve other batches too: the operator then goes
    by one whole document.

    Args:
        request ([`AttentionRequest`]): What was asked for.
        layout ([`SequenceLayout`]): How the batch lies over the ranks.
        q (`torch.Tensor` of shape `(batch, n, q_heads, head_dim)`): This rank's queries.
        k (`torch.Tensor` of shape `(batch, n, kv_heads, head_dim)`): This rank's keys.
    """
    group = request.group
    if request.schedule != "auto" or group.size == 1 or torch.compiler.is_compiling():
        return request
    machine = machine_of_group(group, q.device, request.kernel)
    assert machine is not None, "there are several ranks"
    masks = layout.masks(request.pattern)
    schedule = _chosen(masks, layout.sharding, int(q.shape[2]), int(k.shape[2]), machine.ranks_per_host, group)
    return replace(request, schedule=name_of(schedule, group.size))


def schedule_of(
    request: AttentionRequest, sizes: HeadSizes, batch: int, tokens: int, machine: Machine | None
) -> Schedule:
    """The schedule that the operator executes; for `"auto"` that of one whole document of this length.

    Args:
        request ([`AttentionRequest`]): What was asked for.
        sizes ([`HeadSizes`]): Heads of q, k and v.
        batch (`int`): Rows of the batch.
        tokens (`int`): Tokens of a rank.
        machine ([`Machine`], *optional*): The machine of the group, if there are several ranks.

    Raises:
        ConfigError: If the ranks cannot execute the schedule asked for with these heads.
    """
    group = request.group
    if request.schedule != "auto":
        return named_schedule(request.schedule, sizes, group.size)
    if machine is None:
        return Schedule()
    masks, sharding = _whole_document(request.pattern, int(tokens) * group.size, int(batch), group.size)
    return _chosen(masks, sharding, sizes.q_heads, sizes.kv_heads, machine.ranks_per_host, group)


@lru_cache(maxsize=64)
def named_schedule(name: str, sizes: HeadSizes, ranks: int) -> Schedule:
    """The schedule of a name.

    Args:
        name (`str`): As in [`BurstConfig`], not `"auto"`.
        sizes ([`HeadSizes`]): Heads of q, k and v.
        ranks (`int`): Ranks of the group.

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
def _whole_document(pattern: MaskPattern, length: int, batch: int, ranks: int) -> tuple[tuple[Mask, ...], Sharding]:
    masks = (pattern.mask(length, (0, length)),) * batch
    return masks, cut(length, assign(masks, ranks))


@lru_cache(maxsize=64)
def _chosen(
    masks: tuple[Mask, ...],
    sharding: Sharding,
    q_heads: int,
    kv_heads: int,
    ranks_per_host: int,
    group: ContextGroup,
) -> Schedule:
    """The choice. Rank 0 logs it, quietly for packed documents, as there is one for every batch."""
    choice = choose(masks, sharding, q_heads, kv_heads, ranks_per_host)
    if group.rank == 0:
        documents = sum(len(mask.documents) - 1 for mask in masks)
        logger.log(
            logging.INFO if documents == len(masks) else logging.DEBUG,
            "hf_burst runs %s for %d x %d tokens, %d query and %d key heads, documents: %d (%s)",
            name_of(choice.schedule, group.size),
            len(masks),
            masks[0].length,
            q_heads,
            kv_heads,
            documents,
            choice.reason,
        )
    return choice.schedule
