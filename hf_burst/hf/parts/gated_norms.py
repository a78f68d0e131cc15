"""Norms of the gated outputs of delta rules, by one kernel of flash-linear-attention instead of about ten of torch."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...recurrent import fla_compared, fla_gated_norm
from ..context import current
from ..models.gated_norm import gated_norms
from ..overrides import Override
from ..view import ModelView
from .base import Handles, Part


class GatedNorms(Part):
    """Gives gated norms a forward by that kernel, unless they have a forward of their own."""

    def look(self, view: ModelView) -> Handles:
        for norm, activation in view.find(gated_norms):
            if "forward" not in vars(norm):
                GatedNorm.put(norm, activation, depends_on(norm))
        return ()


class GatedNorm(Override):
    """The forward of a gated norm: by the kernel in passes of the patched model, on a device that has it. It is given
    the activation, and what the formula depended on when it was read."""

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Any:
        norm: Any = self.module
        activation, formula = self.more
        known = hidden_states.dtype != torch.float64 and not isinstance(norm.weight, DTensor)
        if known and formula == depends_on(norm) and current() is not None and fla_compared(hidden_states.device):
            return fla_gated_norm(hidden_states, gate, norm.weight, norm.variance_epsilon, activation)
        return self.plain(hidden_states, gate)


def depends_on(norm: Any) -> tuple[Any, Any]:
    """Returns what the formula of a norm depends on, because a class or an activation may be changed later."""
    return type(norm).forward, getattr(norm, "activation", None)
