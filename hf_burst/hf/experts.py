"""The load-balancing loss of mixtures of experts over several ranks (Switch Transformer, arXiv 2101.03961, equations 4
to 6), which is no sum over tokens: it multiplies how many tokens chose an expert with the mean of its probabilities."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..loss import group_sum
from .batch import ForwardCall


class RouterLogits:
    """What the routers of one model scored in the forward pass under way, caught where the decoder returns it.

    Args:
        model (`PreTrainedModel`): The model; a hook is added to its decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: tuple[torch.Tensor, ...] = ()
        self.handles: list[RemovableHandle] = []
        if hasattr(model.config.get_text_config(), "output_router_logits"):
            self.handles = [
                model.base_model.register_forward_hook(self._catch, with_kwargs=True),
                model.register_forward_hook(self._forget, always_call=True),
            ]

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("burst_call") is not None:
            self.layers = output.get("router_logits") or ()

    def _forget(self, *_: Any) -> None:
        self.layers = ()


def balance_loss(layers: tuple[torch.Tensor, ...], chosen: int, call: ForwardCall) -> torch.Tensor:
    """The load-balancing loss of the whole batch: the same value on every rank, the gradient as in `group_loss`.

    Args:
        layers (tuple of `torch.Tensor` of shape `(batch x n, experts)`): The routers' scores of this rank's tokens.
        chosen (`int`): Experts that a token is sent to.
        call ([`ForwardCall`]): Which of the tokens are not padding.
    """
    experts = layers[0].shape[-1]
    real = call.layout.counted(call.group.rank).flatten().to(layers[0].device)
    counts, probabilities = layers[0].new_zeros(2, experts, dtype=torch.float32).unbind()
    for scores in layers:
        weights = scores.reshape(-1, experts)[real].softmax(-1)
        picked = weights.topk(chosen, dim=-1).indices.flatten()
        counts = counts + torch.bincount(picked, minlength=experts)
        probabilities = probabilities + weights.float().sum(0)
    totals = torch.cat([counts, real.sum()[None] * len(layers)])
    if call.group.size > 1:
        dist.all_reduce(totals, group=call.group.process_group)
        probabilities = group_sum(probabilities, call.group)
    rows = totals[-1]
    return experts * (totals[:-1] / rows * (probabilities / rows)).sum()
