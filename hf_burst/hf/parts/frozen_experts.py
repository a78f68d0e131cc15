"""Experts that do not learn, by torch's grouped products in place of Liger's kernels."""

from typing import Any

import torch

from ..forward_pass import ForwardPass
from ..overrides import Override
from ..view import ModelView
from .base import Part

_HOPPER = (9, 0)  # from which on torch has a kernel for grouped products


class FrozenExperts(Part):
    """Gives experts that Liger computes the forward of their class while their weights do not learn. Liger's backward
    pass computes gradients of weights in any case, and its kernels take a minute of a first step to be tuned."""

    def begin(self, run: ForwardPass) -> None:
        for module in run.call.view.find(experts) if grouped_products(run.device) else ():
            if getattr(vars(module).get("forward"), "__module__", "").startswith("liger_kernel."):
                GroupedForward.put(module)


class GroupedForward(Override):
    """The forward of Transformers if no weight learns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if any(weight.requires_grad for weight in module.parameters()):
            return self.plain(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)


def experts(view: ModelView) -> list[Any]:
    """Returns the modules whose class computes all experts of a layer by grouped products."""
    modules: Any = (module for module in view.modules if hasattr(module, "_is_expert_parallel"))
    return [module for module in modules if module.config._experts_implementation == "grouped_mm"]


def grouped_products(device: torch.device) -> bool:
    """Returns whether torch has a kernel for products of which each expert has its own rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
