"""Gated norms of delta rules, recognised by their outputs."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..view import ModelView
from .recurrent import recurrent_modules

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
_WIDTH = 17  # hidden size of the test input; prime, so no group size divides it


def gated_norms(view: ModelView) -> list[tuple[nn.Module, str]]:
    """Finds the norms inside recurrent modules that return `x / sqrt(mean(x^2) + eps) * weight * activation(gate)`.

    Args:
        view ([`ModelView`]): Any model; its weights are not read.

    Returns:
        `list[tuple[nn.Module, str]]`: Each norm and the name of its activation, a key of `ACTIVATIONS`. `eps` is its
        `variance_epsilon`. Norms with another formula are left out.
    """
    inner = dict.fromkeys(module for layer in view.find(recurrent_modules) for module in view.inside(layer))
    return [(module, activation) for module in inner if (activation := activation_of(module)) is not None]


def activation_of(module: nn.Module) -> str | None:
    """Returns the activation of a gated norm, or `None` for any other module. The test uses a fresh weight, because the
    module's own may be sharded or on `meta`, and inputs so small that `eps` matters."""
    weights, norm = dict(module.named_parameters()), type(module).forward
    eps: Any = getattr(module, "variance_epsilon", None)
    if list(weights) != ["weight"] or weights["weight"].ndim != 1 or not isinstance(eps, float):
        return None
    if list(inspect.signature(norm).parameters) != ["self", "hidden_states", "gate"]:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    weight, x, gate = torch.randn(3, 2, _WIDTH, dtype=torch.float64, generator=generator, device="cpu")
    x *= eps**0.5
    asked: Any = copy.copy(module)
    asked._parameters = {"weight": nn.Parameter(weight[0].float())}
    try:
        with torch.no_grad():
            said = norm(asked, x.float(), gate.float())
    except Exception:  # the module takes other inputs than a gated norm
        return None
    if not isinstance(said, Tensor) or said.shape != x.shape:
        return None
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight[0]
    for name, activation in ACTIVATIONS.items():
        if torch.allclose(said.double(), normed * activation(gate), rtol=1e-4, atol=1e-6):
            return name
    return None
