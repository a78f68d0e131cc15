"""The load-balancing loss of mixtures of experts over several ranks (Switch Transformer, arXiv 2101.03961, equations 4
to 6), which is no sum over tokens: it multiplies how many tokens chose an expert with the mean of its probabilities."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..loss import group_sum
from .batch import ForwardCall


class RouterLogits:
    """What the routers of one model scored in the forward pass under way, caught where its decoder returns it.

    Args:
        model (`PreTrainedModel`): The model; a hook is added to its decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: tuple[torch.Tensor, ...] = ()
        self.handles: list[RemovableHandle] = []
        if hasattr(model.config, "output_router_logits"):
            self.handles.append(model.base_model.register_forward_hook(self._catch, with_kwargs=True))

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.layers = (output.get("router_logits") or ()) if kwargs.get("burst_call") is not None else ()

    def take(self) -> tuple[torch.Tensor, ...]:
        """The scores of each layer, `(batch x n, experts)`; none if they were not asked for. Forgets them."""
        layers, self.layers = self.layers, ()
        return layers


def check_balance(model: PreTrainedModel, asked: bool | None = None) -> None:
    """Raises for a load-balancing loss that does not follow from what the model's class says of its experts.

    Args:
        model (`PreTrainedModel`): The model.
        asked (`bool`, *optional*): `output_router_logits` of a forward pass; by default the config's.
    """
    wanted = getattr(model.config, "output_router_logits", False) if asked is None else asked
    balanced = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    known = hasattr(model, "router_aux_loss_coef") and hasattr(model, "num_experts_per_tok")
    if wanted and balanced and not known:
        raise UnsupportedModelError(
            f"output_router_logits is set, and the load-balancing loss that {type(model).__name__} adds then is not "
            "served over several ranks. Set config.output_router_logits=False."
        )


def balance(
    output: Any, layers: tuple[torch.Tensor, ...], model: Any, call: ForwardCall, items: torch.Tensor | float | None
) -> Any:
    """Outputs with the load-balancing loss of the whole batch in place of that of this rank's tokens.

    Args:
        output (`ModelOutput`): What the model returned; its loss, if it has one, has the balance loss added.
        layers (tuple of `torch.Tensor` of shape `(batch x n, experts)`): The routers' scores of this rank's tokens.
        model (`PreTrainedModel`): The model.
        call ([`ForwardCall`]): How the batch is sharded.
        items (`torch.Tensor` or `float`, *optional*): `num_items_in_batch`: then the loss is yet to be multiplied by
            the number of processes, of which those of a group hold one batch.
    """
    fields = dict(output.items())
    whole = balance_loss(layers, model.num_experts_per_tok, call)
    if fields.get("loss") is not None:
        share = 1 if items is None else 1 / call.group.size
        fields["loss"] = fields["loss"] + model.router_aux_loss_coef * (share * whole - fields["aux_loss"])
    fields["aux_loss"] = whole
    if call.group.size > 1:
        fields.pop("router_logits", None)
    return type(output)(**fields)


def balance_loss(layers: tuple[torch.Tensor, ...], chosen: int, call: ForwardCall) -> torch.Tensor:
    """The load-balancing loss of the whole batch: the same value on every rank, the gradient as in `group_loss`.

    Args:
        layers (tuple of `torch.Tensor` of shape `(batch x n, experts)`): The routers' scores of this rank's tokens.
        chosen (`int`): Experts that a token is sent to.
        call ([`ForwardCall`]): Which of the tokens are not padding.
    """
    experts = layers[0].shape[-1]
    real = call.layout.counted(call.group.rank).flatten().to(layers[0].device)
    counts, probabilities = torch.zeros(2, experts, device=real.device).unbind()
    for scores in layers:
        weights = scores.reshape(-1, experts)[real].softmax(-1)
        picked = weights.topk(chosen, dim=-1).indices.flatten()
        counts = counts + torch.bincount(picked, minlength=experts)
        probabilities = probabilities + weights.float().sum(0)
    totals = torch.cat([counts, real.sum()[None] * len(layers)])
    if call.group.size > 1:
        dist.all_reduce(totals, group=call.group.process_group)
    rows = totals[-1]
    return experts * (totals[:-1] / rows * group_sum(probabilities, call.group) / rows).sum()
