"""LoRA adapters of peft beside frozen linear layers, computed in fewer passes over memory."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...layers.adapted_linear import adapted_linear, autocast_dtype
from ..forward_pass import ForwardPass
from ..overrides import Override
from ..view import hooks_of
from .base import Part

_LAYERS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_OF_4_BITS = {("bitsandbytes.nn.modules", name) for name in ("Linear4bit", "LinearNF4", "LinearFP4")}


class Adapters(Part):
    """Gives a model's LoRA layers their own forward, see [`adapted_linear`]."""

    def begin(self, run: ForwardPass) -> None:
        # Not used if the model is compiled (a compiler fuses these passes itself), if hooks on all modules expect
        # peft's modules (such as a counter), or if selective checkpoints save outputs of peft's operators. Decided once
        # for each pass of the model, because a recomputed layer must do what it did before.
        plain = run.call.compiled or run.checkpoints.selective or nn.modules.module._has_any_global_hook()
        for layer in run.call.view.where(_is_adapter):
            own = _AdaptedForward.of(layer)
            if plain and own is not None:
                own.remove()
            elif not plain and "forward" not in vars(layer):
                _AdaptedForward.put(layer)


class _AdaptedForward(Override):
    """The forward of a LoRA layer. It leaves to the layer what it does not know: several adapters at once, merged ones,
    variants such as DoRA, layers with hooks, and tokens that are generated one by one."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self.module
        name = None if args or kwargs else _adapter(layer, x)
        if name is None:
            return self.plain(x, *args, **kwargs)
        base, dropout = layer.base_layer, layer.lora_dropout[name]
        dropped = dropout(x) if dropout.training and not isinstance(dropout, nn.Identity) else None
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        return adapted_linear(x, base.weight, base.bias, down, up, layer.scaling[name], dropped)


def _is_adapter(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__name__) in _LAYERS


def _adapter(layer: Any, x: Tensor) -> str | None:
    """Returns the name of the only active adapter, if the layer is just three linear products in one dtype, and the
    call is neither compiled, nor transformed by torch.func, nor of a vector or a single generated token."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or x.dim() < 2:
        return None
    if x.shape[-2] == 1 and not layer.training and not torch.is_grad_enabled():
        return None
    names = [] if layer.disable_adapters or layer.merged else layer.active_adapters
    active = [name for name in names if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    name: str = active[0]
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if type(dropout) not in (nn.Dropout, nn.Identity) or _is_changed(dropout):
        return None
    if not all(map(_is_bare, (base, down, up))) or down.bias is not None or up.bias is not None:
        return None
    if any(weight.requires_grad for weight in base.parameters()) or not isinstance(layer.scaling[name], float | int):
        return None
    dtypes, cast = {x.dtype, down.weight.dtype, up.weight.dtype}, autocast_dtype(x, base.weight)
    if type(base) is nn.Linear:
        dtypes.add(base.weight.dtype)
    else:
        computes = base.compute_dtype if base.compute_type_is_set else x.dtype  # taken from the first input
        if not computes == x.dtype == (cast or x.dtype):
            return None
    return name if len(dtypes) == 1 or (cast is not None and torch.float64 not in dtypes) else None


def _is_bare(linear: Any) -> bool:
    """Returns whether a module is an unchanged linear layer of torch or bitsandbytes, its weights in place."""
    kind = type(linear)
    in_4_bits = (kind.__module__, kind.__name__) in _OF_4_BITS
    if not (kind is nn.Linear or in_4_bits) or _is_changed(linear):
        return False
    plain = [linear.bias] if in_4_bits else [linear.weight, linear.bias]
    if any(weight is not None and type(weight) is not nn.Parameter for weight in plain):
        return False
    return not in_4_bits or _has_its_state(linear)


def _is_changed(module: nn.Module) -> bool:
    """Returns whether a module has hooks or another forward."""
    return bool(hooks_of(module)) or "forward" in vars(module)


def _has_its_state(linear: Any) -> bool:
    """Returns whether a 4-bit weight can be dequantized, after bitsandbytes has restored what FSDP2 lost. Raises if
    FSDP2 has cast it."""
    known, stored, found = getattr(linear.weight, "quant_state", None), linear.quant_storage, linear.weight.dtype
    if linear.quant_state is None and known is None:
        return False
    if known is None and found != stored:
        raise ConfigError(
            f"Weights of 4 bits are stored as {stored}, and FSDP2 casts to {found}",
            "other numbers would be read",
            f"Set bnb_4bit_quant_storage={str(found)[6:]!r}, or load in that dtype",
        )
    from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module

    fix_4bit_weight_quant_state_from_module(linear)
    state = linear.weight.quant_state
    for_cpus = getattr(state, "packing_format_for_cpu", False)
    return tuple(state.shape) == (linear.out_features, linear.in_features) and not for_cpus
