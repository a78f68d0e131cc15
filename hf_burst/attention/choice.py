"""Turns the requested schedule into the one that runs; `"auto"` follows the rule of `hf_burst.plan.schedules`."""

import logging
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Schedule
from ..errors import ConfigError
from ..numerics import accumulation_dtype
from ..plan import MaskPattern, Shapes, assign, choose_schedule, name_of
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from ..ring.resources import resources_of
from .request import AttentionRequest, InputKind

logger = logging.getLogger(__name__)


def with_schedule(
    request: AttentionRequest, layout: SequenceLayout, q: Tensor, k: Tensor, v: Tensor
) -> AttentionRequest:
    """Returns the request with the schedule for this batch's documents.

    While compiling, the request stays unchanged, because the graph must serve other batches too; the operator then
    assumes one whole document.

    Args:
        request, layout, q, k, v: As in [`burst_attention`].

    Raises:
        ConfigError: If the ranks cannot run the requested schedule with these heads.
    """
    if torch.compiler.is_compiling():
        return request
    return replace(request, schedule=schedule_of(request, InputKind.of(q, k, v), layout))


def schedule_of(request: AttentionRequest, inputs: InputKind, layout: SequenceLayout | None = None) -> Schedule:
    """Returns the schedule that runs.

    Args:
        request ([`AttentionRequest`]): The request.
        inputs ([`InputKind`]): The kind of q, k and v.
        layout ([`SequenceLayout`], *optional*): The layout that `"auto"` is for; by default one whole document a row.

    Raises:
        ConfigError: If the ranks of the group cannot run the requested schedule with these heads.
    """
    ranks, asked, sizes = request.group.size, request.schedule, inputs.sizes
    if asked == "auto" and ranks == 1:
        return Schedule()  # lengths stay symbolic while compiling
    if asked == "auto":
        length, rows = int(inputs.tokens) * ranks, int(inputs.batch)
        if layout is None:
            owners = assign((request.pattern.mask(length, (0, length)),) * rows, ranks)
            layout = SequenceLayout(length, owners, ((0, length),) * rows)
        shapes = Shapes(*sizes, inputs.dtype.itemsize, accumulation_dtype(inputs.dtype).itemsize)
        # the ranks agree on it at the first call, which all make at the same time, and not while tracing a graph
        per_host = resources_of(request.group).ranks_per_host(inputs.device)
        return _chosen(layout, request.pattern, shapes, per_host, request.group)
    schedule = asked if isinstance(asked, Schedule) else Schedule.parse(asked, ranks)
    refusal = schedule.refusal(ranks, sizes.q_heads, sizes.kv_heads)
    if refusal is not None:
        raise ConfigError(
            f"The schedule {name_of(schedule, ranks)!r} cannot be had: {refusal}. Take one that can "
            "(BurstConfig(schedule='auto') does), or another number of ranks."
        )
    return schedule


@lru_cache(maxsize=64)
def _chosen(
    layout: SequenceLayout, pattern: MaskPattern, shapes: Shapes, ranks_per_host: int, group: ContextGroup
) -> Schedule:
    """Chooses a schedule. Rank 0 logs it, at debug level for packed documents, because every batch has a choice."""
    masks = layout.masks(pattern)
    choice = choose_schedule(masks, layout.sharding, shapes, ranks_per_host)
    if group.rank == 0 and group.size > 1:
        documents = sum(len(mask.documents) - 1 for mask in masks)
        level = logging.INFO if documents == len(masks) else logging.DEBUG
        heads = f"{shapes.q_heads} query and {shapes.kv_heads} key heads"
        batch = f"{len(masks)} x {masks[0].length} tokens, {heads}"
        name = name_of(choice.schedule, group.size)
        logger.log(level, "hf_burst runs %s for %s, documents: %d (%s)", name, batch, documents, choice.reason)
    return choice.schedule
