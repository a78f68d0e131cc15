"""Sharding of full batches over the ranks."""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ...config import BurstConfig
from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from ...plan import MaskPattern, RecurrentSize
from ...ranks.layout import SequenceLayout
from ..models.cut_point import MASKED_ROWS, TOKEN_INPUTS
from ..models.task import CAUSAL, Task, forwards_of
from .documents import (
    BOUNDARY_KEYS,
    TOKEN_KEYS,
    batch_shape,
    check_shape,
    documents_of,
    real_tokens,
    tensors_in,
    tokens_of,
)

_TARGETS = ("labels", "shift_labels")
_EMBEDDINGS = ("inputs_embeds", "per_layer_inputs")


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a forward pass by name.

    A user's class may only pass on `*args`, so the names come from the first base class that names token arguments.
    """
    signatures = [inspect.signature(forward) for forward in forwards_of(module)]
    naming = [signature for signature in signatures if set(TOKEN_KEYS) & set(signature.parameters)]
    bound = (naming or signatures)[0].bind_partial(module, *args, **kwargs)
    arguments: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif index:  # the first is the model
            arguments[name] = value
    return arguments


def kept_tokens(keep: int | torch.Tensor, length: int) -> Sequence[int]:
    """Returns the token indices that `logits_to_keep` means in a sequence of this length."""
    if isinstance(keep, torch.Tensor):
        bad = keep.dtype == torch.bool or keep.ndim != 1 or not len(keep)
        bad = bad or bool(((keep < -length) | (keep >= length)).any())
    else:
        keep = operator.index(keep)
        bad = keep < 0
    if bad:
        raise BatchError(
            f"logits_to_keep is {keep}; it must be a number of last tokens, or a tensor of one or more indices into "
            f"the {length} tokens of the sequence."
        )
    return range(max(0, length - keep), length) if isinstance(keep, int) else [row % length for row in keep.tolist()]


def layout_of(
    batch: Mapping[str, Any],
    config: BurstConfig,
    ranks: int,
    task: Task = CAUSAL,
    patterns: Mapping[MaskPattern, int] | None = None,
    hybrid: tuple[RecurrentSize, ...] = (),
    parents: Sequence[tuple[int, ...]] = (),
) -> SequenceLayout:
    """Returns the layout of a full batch over the ranks, balanced for layers with these mask `patterns` (by default
    full attention) and for recurrent ones. Documents may continue others, by `parents` as in [`SequenceLayout`]."""
    return SequenceLayout.for_batch(
        documents_of(batch, task),
        ranks,
        config.chunking_over(ranks),
        real=real_tokens(batch),
        patterns=patterns or {MaskPattern(task.causal): 1},
        stretches=config.memory_settings.stretches,
        hybrid=hybrid,
        parents=parents,
    )


def check_padding(labelled: torch.Tensor) -> None:
    """Raises if tokens of padding have labels; `labelled` marks them."""
    if labelled.any():
        raise BatchError(
            f"{int(labelled.sum())} tokens of padding that attention_mask hides have labels to predict. Set the labels "
            f"of padding to {IGNORE_INDEX}."
        )


def cut_targets(batch: Mapping[str, Any], layout: SequenceLayout, rank: int, task: Task) -> dict[str, torch.Tensor]:
    """Returns one rank's shard of the labels and prediction targets; empty for a batch without labels."""
    labels = batch.get("labels")
    if labels is None or task.reads:
        return {}
    check_shape("labels", labels, batch_shape(batch))
    targets = task.targets_of(labels)
    mask = batch.get("attention_mask")
    if mask is not None:
        # padding sees other tokens than in Transformers, so its predictions must not count
        counted = (targets[task.targets] != IGNORE_INDEX) & (mask == 0)
        if task.causal:  # at the start of a row it sees nothing, here and in Transformers
            for row, (start, _) in enumerate(layout.real):
                counted[row, :start] = False
        check_padding(counted)
    return {name: layout.shard(value, rank, IGNORE_INDEX) for name, value in targets.items()}


def cut_inputs(
    inputs: Mapping[str, Any], layout: SequenceLayout, rank: int, positions: torch.Tensor | None = None
) -> dict[str, Any]:
    """Returns one rank's shard of a cut point's inputs, by name. Targets are sharded already.

    If the inputs have no position ids, `positions` of shape `(batch, tokens)` are added, by default from 0. The padding
    mask and document boundaries are left out, because the layout has them."""
    whole = select_rows(inputs, lambda values: layout.shard(values, rank))
    whole = {name: value for name, value in whole.items() if name not in (*BOUNDARY_KEYS, "attention_mask")}
    tokens = tokens_of(whole)
    rows, length = tokens.shape[:2]
    if whole.get("position_ids") is not None:
        positions = whole["position_ids"]
    elif positions is None:
        positions = torch.arange(length, device=tokens.device)
    whole["position_ids"] = positions.expand(*positions.shape[:-2], rows, length)
    part = {}
    for name, value in whole.items():
        if name in TOKEN_INPUTS and value is not None:
            cut = layout.shard(value, rank, dim=TOKEN_INPUTS[name])
            part[name] = _filled(cut, value, layout, rank) if name in _EMBEDDINGS and layout.padding else cut
            continue
        shapes = (tuple(tensor.shape) for tensor in tensors_in(value) if tensor.ndim > 1)
        if name not in (*_TARGETS, *MASKED_ROWS) and (shape := next(shapes, None)):
            raise BatchError(
                f"{name} of shape {shape} looks like values of tokens, images or audio; known are "
                f"{', '.join((*TOKEN_INPUTS, *_TARGETS))} and attention_mask. Remove it from the batch."
            )
        part[name] = value
    return part


def select_rows(inputs: Mapping[str, Any], select: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Returns the inputs of a cut point, with masked inputs reduced to the rows of some tokens. `select` takes these
    tokens from a per-token tensor. Gradients are zero for the other rows."""
    part = dict(inputs)
    for name, known in MASKED_ROWS.items():
        mask, rows = inputs.get(known), inputs.get(name)
        if mask is not None and rows is not None:
            numbers = (mask.flatten().cumsum(0) - 1).view_as(mask)  # row index of each selected token
            own = select(numbers)[select(mask)]
            part[name] = tree_map(partial(torch.index_select, dim=0, index=own), rows)
    return part


def _filled(cut: torch.Tensor, whole: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """Returns a rank's embeddings with a real token's instead of padding: the deviation of zeros has no gradient."""
    real = layout.shard(torch.ones(whole.shape[1], dtype=torch.bool, device=whole.device), rank, dim=0)
    return torch.where(real.view(1, -1, *[1] * (cut.ndim - 2)), cut, whole[:, :1].detach())
