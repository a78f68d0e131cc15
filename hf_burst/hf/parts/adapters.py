"""Adapters of peft (LoRA) beside frozen linear layers, computed in fewer passes over memory."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapted_linear import adapted_linear, autocast_dtype
from .base import ForwardPass, Part

_LAYERS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_OF_4_BITS = {("bitsandbytes.nn.modules", name) for name in ("Linear4bit", "LinearNF4", "LinearFP4")}


class Adapters(Part):
    """Gives the LoRA layers of a model a forward of their own, see [`adapted_linear`]."""

    def begin(self, run: ForwardPass) -> None:
        if run.compiled:  # the compiler joins these passes itself
            self.remove(run.model)
            return
        for layer in _layers(run.model):  # added at any time
            if "forward" not in vars(layer):
                layer.forward = _AdaptedForward(layer)

    def remove(self, model: PreTrainedModel) -> None:
        for layer in _layers(model):
            if isinstance(vars(layer).get("forward"), _AdaptedForward):
                del layer.forward


class _AdaptedForward:
    """Stands for the `forward` of a LoRA layer. What it does not know is left to the layer's own one: several adapters
    at once, merged ones, variants such as DoRA, and layers that somebody hooks."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args or kwargs or torch.compiler.is_compiling() else self._adapter()
        if name is None or not self._is_plain(x, name):
            own: Tensor = type(self.layer).forward(self.layer, x, *args, **kwargs)
            return own
        layer, base, dropout = self.layer, self.layer.base_layer, self.layer.lora_dropout[name]
        dropped = dropout(x) if dropout.training and not isinstance(dropout, nn.Identity) else None
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        return adapted_linear(x, base.weight, base.bias, down, up, layer.scaling[name], dropped)

    def _adapter(self) -> str | None:
        """The name of the only adapter that is at work; `None` if there is none, or several."""
        layer = self.layer
        names = [] if layer.disable_adapters or layer.merged else layer.active_adapters
        active = [name for name in names if name in layer.lora_A]
        return active[0] if len(active) == 1 and active[0] not in layer.lora_variant else None

    def _is_plain(self, x: Tensor, name: str) -> bool:
        """Whether the products are those of three linear layers, in one dtype and without anything beside them."""
        base, down, up = linears = self.layer.base_layer, self.layer.lora_A[name], self.layer.lora_B[name]
        if x.dim() < 2 or not all(map(_is_bare, linears)) or down.bias is not None or up.bias is not None:
            return False
        if any(weight.requires_grad for weight in base.parameters()):
            return False
        dtypes = {x.dtype, base.weight.dtype, down.weight.dtype, up.weight.dtype}
        cast = autocast_dtype(x, base.weight)
        if type(base) is not nn.Linear:
            dtypes.remove(base.weight.dtype)
            computes = base.compute_dtype if base.compute_type_is_set else x.dtype  # as the first input has it
            if not (computes == x.dtype == (cast or x.dtype)):
                return False
        casts = cast is not None and torch.float64 not in dtypes
        return (casts or len(dtypes) == 1) and isinstance(self.layer.scaling[name], float | int)


def _is_bare(linear: nn.Module) -> bool:
    """Whether a module is a linear layer as it is in torch or bitsandbytes, its weights in place, and without hooks."""
    kind = type(linear)
    in_4_bits = (kind.__module__, kind.__name__) in _OF_4_BITS
    hooks = linear._forward_pre_hooks or linear._forward_hooks or linear._backward_pre_hooks or linear._backward_hooks
    if not (kind is nn.Linear or in_4_bits) or "forward" in vars(linear) or hooks:
        return False
    if in_4_bits:
        state = getattr(linear.weight, "quant_state", None)
        shape = linear.out_features, linear.in_features
        if state is None or tuple(state.shape) != shape or getattr(state, "packing_format_for_cpu", False):
            return False
    return all(
        type(weight) is nn.Parameter for name, weight in linear.named_parameters() if name == "bias" or not in_4_bits
    )


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if (type(module).__module__, type(module).__name__) in _LAYERS]
