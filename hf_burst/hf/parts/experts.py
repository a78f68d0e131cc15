"""The load-balancing loss of mixtures of experts over several ranks (Switch Transformer, arXiv 2101.03961, equations 4
to 6). It is no sum over tokens: it multiplies the number of tokens that chose an expert by its mean probability."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ...ranks.collectives import group_sum
from ..context import PASS_KEY
from ..forward_pass import Call, ForwardPass
from ..view import ModelView
from .base import Args, Handles, Kwargs, Outputs, Part


class RouterLogits(Part):
    """Replaces the load-balancing loss of this rank's tokens with that of the whole batch. A hook reads the router
    scores where the decoder returns them, because outputs of TRL have none."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_balance(model)
        self.scores: tuple[Tensor, ...] = ()

    def look(self, view: ModelView) -> Handles:
        if not hasattr(view.root.config, "output_router_logits"):
            return ()
        return [view.root.base_model.register_forward_hook(self._catch, with_kwargs=True)]

    def admit(self, call: Call) -> None:
        asked = call.given.get("output_router_logits")
        call.agreement.add("router logits", asked)
        check_balance(call.model, asked)

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        if not self.scores or outputs.get("aux_loss") is None:
            return
        model: Any = run.model
        balance = balance_loss(self.scores, model.num_experts_per_tok, run)
        if outputs.get("loss") is not None:
            own = outputs["aux_loss"]
            outputs["loss"] = outputs["loss"] + model.router_aux_loss_coef * (balance_share(run) * balance - own)
        outputs["aux_loss"] = balance

    def end(self) -> None:
        self.scores = ()

    def _catch(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        if kwargs.get(PASS_KEY) is not None:
            self.scores = getattr(output, "router_logits", None) or ()


def check_balance(model: PreTrainedModel, asked: bool | None = None) -> None:
    """Raises for a load-balancing loss that cannot be computed from the attributes of the model's class, if
    `output_router_logits` of the pass, or by default of the config, asks for it."""
    wanted = getattr(model.config, "output_router_logits", False) if asked is None else asked
    balanced = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    known = hasattr(model, "router_aux_loss_coef") and hasattr(model, "num_experts_per_tok")
    if wanted and balanced and not known:
        raise UnsupportedModelError(
            f"output_router_logits is set, and the load-balancing loss that {type(model).__name__} adds then is not "
            "served over several ranks. Set config.output_router_logits=False."
        )


def balance_share(run: ForwardPass) -> float:
    """Returns the weight of the load-balancing loss on a rank. With `num_items_in_batch`, the loss is later multiplied
    by the number of processes, and those of a group share one batch."""
    return 1 if run.call.items is None else 1 / run.group.size


def balance_loss(scores: tuple[Tensor, ...], per_token: int, run: ForwardPass) -> Tensor:
    """Returns the load-balancing loss of the whole batch: equal on every rank, with the gradient as in `group_sum`.

    Args:
        scores (tuple of `torch.Tensor` of shape `(batch x n, experts)`): The router scores of this rank's tokens.
        per_token (`int`): Number of experts per token.
        run ([`ForwardPass`]): The pass, which knows the padding.
    """
    experts = scores[0].shape[-1]
    layout, rank, device = run.batch.layout, run.group.rank, scores[0].device
    real = layout.counted(rank).flatten().to(device)
    texts = layout.texts(rank).flatten().to(device)[real].float()
    counts, probabilities = torch.zeros(2, experts, dtype=texts.dtype, device=device).unbind()
    for layer in scores:
        weights = layer.reshape(-1, experts)[real].softmax(-1)
        picked = weights.topk(per_token, dim=-1).indices
        counts = counts.index_add(0, picked.flatten(), texts.repeat_interleave(per_token))
        probabilities = probabilities + (weights.float() * texts[:, None]).sum(0)
    totals = group_sum(torch.cat([counts, texts.sum()[None] * len(scores)]), run.group)
    rows = totals[-1]
    return experts * (totals[:-1] / rows * group_sum(probabilities, run.group) / rows).sum()
