"""Experts that do not learn, by torch's grouped products in place of Liger's kernels."""

from types import MethodType
from typing import Any

import torch

from ..forward_pass import ForwardPass
from ..overrides import Override
from ..view import ModelView
from .base import Part


class FrozenExperts(Part):
    """Computes experts by the forward of their class in place of Liger's while their weights do not learn. Liger's
    backward pass computes gradients of weights in any case, and its kernels take a minute of a first step to be tuned.
    """

    def begin(self, run: ForwardPass) -> None:
        for module in run.call.view.find(experts) if grouped_products(run.device) else ():
            forward, how = vars(module).get("forward"), module.config._experts_implementation
            ligers = isinstance(forward, MethodType) and forward.__module__.startswith("liger_kernel.")
            if ligers and how == "grouped_mm":
                GroupedForward.put(module)


class GroupedForward(Override):
    """The forward of Transformers if no weight learns, in bf16, for which torch has kernels."""

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        learns = any(weight.requires_grad for weight in module.parameters())
        if learns or hidden_states.dtype != torch.bfloat16:
            return self.plain(hidden_states, *args, **kwargs)
        return type(module).forward(module, hidden_states, *args, **kwargs)


def experts(view: ModelView) -> list[Any]:
    """Returns the modules whose class can compute all experts of a layer by grouped products."""
    return [module for module in view.modules if hasattr(module, "is_transposed")]


def grouped_products(device: torch.device) -> bool:
    """Returns whether torch has a kernel for products of which each expert has its own rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
