"""Norms of the gated output of a delta rule: which modules of a model compute one, by what they return."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .recurrent import recurrent_modules

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
_WIDTH = 16  # of what a norm is asked with


def gated_norms(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Finds the norms inside of recurrent modules that return `x / sqrt(mean(x^2) + eps) * weight * activation(gate)`.

    Args:
        model (`nn.Module`): Any model; its weights are not read.

    Returns:
        `list[tuple[nn.Module, str]]`: Each norm and the name of its activation, a key of `ACTIVATIONS`. `eps` is its
        `variance_epsilon`. A norm that is given another formula by its class is not among them.
    """
    inner = {id(module): module for one in recurrent_modules(model) for module in one.modules()}
    found = ((module, activation_of(module)) for module in inner.values())
    return [(module, activation) for module, activation in found if activation is not None]


def activation_of(module: nn.Module) -> str | None:
    """The activation of a gated norm; `None` for a module that computes anything else. It is asked with weights of our
    own, for its may be sharded or on no device, and by numbers so small that `eps` shows."""
    weights, norm = dict(module.named_parameters()), type(module).forward
    eps: Any = getattr(module, "variance_epsilon", None)
    if list(weights) != ["weight"] or weights["weight"].ndim != 1 or eps is None:
        return None
    if len(inspect.signature(norm).parameters) != 3:  # itself, what is normed, and its gate
        return None
    generator = torch.Generator().manual_seed(0)
    weight, x, gate = torch.randn(3, 2, _WIDTH, dtype=torch.float64, generator=generator)
    x *= eps**0.5
    asked: Any = copy.copy(module)
    asked._parameters = {"weight": nn.Parameter(weight[0].float())}
    try:
        with torch.no_grad():
            said = norm(asked, x.float(), gate.float())
    except RuntimeError:  # one that norms groups of a row wants rows of its own width
        return None
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight[0]
    for name, activation in ACTIVATIONS.items():
        if torch.allclose(said.double(), normed * activation(gate), rtol=1e-4, atol=1e-6):
            return name
    return None
