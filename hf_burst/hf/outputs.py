"""From what each rank computed for its tokens to the outputs of the whole batch."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..loss import gather_kept, gather_tokens, group_loss
from .batch import ForwardCall

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
    logits = fields.pop("logits", None)
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
