"""From what each rank computed for its tokens to the outputs of the whole batch."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import BatchError
from ..layout import SequenceLayout
from ..loss import gather_kept, gather_tokens, group_loss
from .batch import ForwardCall
from .head import loss_sum

# for each rank, where the rows that it kept stand in the gathered logits
Places = tuple[tuple[int, ...], ...]

# one value a token, in TRL's output for `fused_lm_head=True`, which holds no logits
_FUSED_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def gather_outputs(output: Any, call: ForwardCall, items: torch.Tensor | float | None, model: PreTrainedModel) -> Any:
    """The outputs of the whole batch, in sequence order; those of a batch that arrived sharded stay sharded.

    Args:
        output (`ModelOutput`): What the model returned for this rank's tokens.
        call ([`ForwardCall`]): How the batch is sharded.
        items (`torch.Tensor` or `float`, *optional*): `num_items_in_batch` of the forward pass.
        model (`PreTrainedModel`): The model.

    Returns:
        `ModelOutput`: Of the same class. Without its logits where they are dropped.
    """
    fields = dict(output.items())
    if "log_probs" in fields:
        return type(output)(**_fused(fields, call, items, model))
    if call.targets is not None:
        fields["loss"] = batch_loss(loss_sum(fields["logits"], call.targets), call, items)
    logits = fields.pop("logits", None)
    if call.rows is not None and call.logits != "drop":
        logits = logits[:, call.rows.to(logits.device)]
    if call.logits == "gather" and call.kept is not None:
        fields["logits"] = gather_kept(logits, call.kept, call.group)
    elif call.logits == "gather":
        fields["logits"] = gather_tokens(logits, call.layout, call.group)
    elif call.logits == "keep":
        fields["logits"] = logits
    if "hidden_states" in fields and not call.explicit and call.group.size > 1:
        fields["hidden_states"] = tuple(
            gather_tokens(state, call.layout, call.group) for state in fields["hidden_states"]
        )
    return type(output)(**fields)


def _fused(
    fields: dict[str, Any], call: ForwardCall, items: torch.Tensor | float | None, model: PreTrainedModel
) -> dict[str, Any]:
    """TRL's per-token outputs. Its trainers compute their losses from these and look at no other rank.

    In training on a sharded batch they stay this rank's: `num_items_in_batch` counts every label once, so that the
    sums of the ranks, which are averaged, are the loss. Evaluation has no such number and needs the whole batch.
    """
    loss = batch_loss(-fields["log_probs"].sum(), call, items)
    if "aux_loss" in fields:  # that of the whole batch already
        share = 1 if items is None else 1 / call.group.size
        loss = loss + model.config.get_text_config().router_aux_loss_coef * share * fields["aux_loss"]
    for name in _FUSED_FIELDS:
        if name in fields and not (call.explicit and model.training):
            fields[name] = gather_tokens(fields[name], call.layout, call.group)
        if name in fields and not call.explicit:  # as without `shift_labels`: the last token predicts nothing
            fields[name] = fields[name][:, :-1]
    return {**fields, "loss": loss}


def batch_loss(local_sum: torch.Tensor, call: ForwardCall, items: torch.Tensor | float | None) -> torch.Tensor:
    """The loss of the whole batch, weighted by tokens over all ranks.

    With `num_items_in_batch` a token counts 1 / `num_items_in_batch`, as in Transformers; else 1 / tokens of the group.
    `num_items_in_batch` is the number of labels gathered and summed over all ranks: a full batch, which every rank of
    a group holds, is counted by each of them, a sharded one once. As in Transformers, the loss is then to be multiplied
    by the number of processes, whose gradients are averaged.

    Args:
        local_sum (`torch.Tensor`, scalar): Sum over this rank's tokens.
        call ([`ForwardCall`]): How the batch is sharded.
        items (`torch.Tensor` or `float`, *optional*): `num_items_in_batch`.
    """
    if items is None:
        return group_loss(local_sum, 1 / call.tokens, call.group)
    if isinstance(items, torch.Tensor):
        items = items.to(local_sum)  # 1 over an integer would be fp32
    return group_loss(local_sum, 1 / (items * call.group.size if call.explicit else items), call.group)


def asks_to_keep(batch: Mapping[str, Any]) -> bool:
    """Whether a batch names the tokens whose logits are wanted."""
    keep = batch.get("logits_to_keep", 0)
    return isinstance(keep, torch.Tensor) or bool(keep)


def keep_rows(keep: int | torch.Tensor, layout: SequenceLayout, rank: int) -> tuple[Places, torch.Tensor]:
    """For `logits_to_keep`: for each rank, the places of its rows in the result; and this rank's rows."""
    length = layout.length - layout.padding
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
    wanted = list(range(max(0, length - keep), length)) if isinstance(keep, int) else keep.flatten().tolist()
    places: list[tuple[int, ...]] = []
    rows: list[int] = []
    for other in range(layout.ranks):
        row_of = {token: row for row, token in enumerate(layout.indices(other).tolist())}
        places.append(tuple(place for place, token in enumerate(wanted) if token % length in row_of))
        if other == rank:
            rows = [row_of[token % length] for token in wanted if token % length in row_of]
    return tuple(places), torch.tensor(rows, dtype=torch.int64)
