"""Experts in 4 bits, by bitsandbytes.

Transformers keeps the experts of a layer in tensors of three dimensions, and quantizes `nn.Linear` alone, so that they
stay in 16 bits. Here they become parametrized weights of 4 bits: reading one dequantizes it, once in a call of its
module. Checkpointed layers keep nothing of it for the backward pass.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationMethod

from ...errors import ConfigError
from ..groups import PATCH
from ..view import ModelView
from .layer_sizes import experts_of

_METHOD = "hf_burst_experts_4bit"


@register_quantization_config(_METHOD)
class Experts4bitConfig(BitsAndBytesConfig):
    """`BitsAndBytesConfig` of 4 bits, which takes experts that lie in tensors of three dimensions, too.

    Each weight is quantized when it has been read, so that a GPU holds one at a time in 16 bits.

    Args:
        kwargs: As in `BitsAndBytesConfig`, such as `bnb_4bit_use_double_quant=True`. By default weights are `"nf4"`.

    Example:

    ```python
    >>> config = hf_burst.Experts4bitConfig(bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=True)
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", quantization_config=config, dtype="bfloat16")
    ```
    """

    def __init__(self, **kwargs: Any) -> None:
        given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **kwargs}
        given.pop("quant_method", None)
        if not given["load_in_4bit"]:
            raise ConfigError(
                "Experts4bitConfig was given load_in_4bit=False. Leave it out, or take BitsAndBytesConfig."
            )
        super().__init__(**given)
        self.quant_method: Any = _METHOD


@register_quantizer(_METHOD)
class Experts4bitQuantizer(Bnb4BitHfQuantizer):
    """What loads a model with an [`Experts4bitConfig`]."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        known = super().param_needs_quantization(model, param_name, **kwargs)
        return known or _holds_experts(getattr(module, name, None), _experts_in(model))

    def is_serializable(self) -> bool:
        return False

    def get_quantize_ops(self) -> "_Quantize":
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        super()._process_model_after_weight_loading(model, **kwargs)
        model.quantization_method = QuantizationMethod.BITS_AND_BYTES  # by which trainers and peft know it
        for module, name, weight in _weights(model):
            if len(getattr(getattr(weight, "quant_state", None), "shape", ())) == 3:
                _parametrize(module, name)
        return model


class _Quantize(Bnb4bitQuantize):
    """What quantizes a weight as soon as it has been read."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        model = kwargs["model"]
        ((path, value),) = input_dict.items()
        value = value[0] if isinstance(value, list) else value
        module, name = get_module_from_name(model, path)
        own = getattr(module, name)
        if not _holds_experts(own, _experts_in(model)):
            return super().convert(input_dict, *args, **kwargs)
        config = self.hf_quantizer.quantization_config
        storage = config.bnb_4bit_quant_storage if config.bnb_4bit_quant_storage.is_floating_point else own.dtype
        how = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, storage
        return {path: _quantized(value.to(own.dtype), *how)}


def quantize_experts(model: PreTrainedModel, quant_type: str = "nf4", double_quant: bool = True) -> PreTrainedModel:
    """Quantizes the experts of a model to 4 bits, where they lie in tensors of three dimensions.

    Quantize on the device on which the model computes, before [`patch_model`], peft and data-parallel wrappers. To
    load a model that fits into a GPU in 4 bits only, give `from_pretrained` an [`Experts4bitConfig`].

    Args:
        model (`PreTrainedModel`): A model with experts, changed in place, such as Qwen3-MoE, Qwen3.5-MoE, Mixtral,
            GLM-4.5 or DeepSeek V3. The weights of experts no longer learn.
        quant_type (`str`, defaults to `"nf4"`): `"nf4"` or `"fp4"`.
        double_quant (`bool`, defaults to `True`): Whether the scales are quantized, too.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model has no such experts, or its weights are sharded or patched already.

    Example:

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16", device_map="cuda")
    >>> model = hf_burst.quantize_experts(model)
    ```
    """
    experts = _experts_in(model)
    found = [place for place in _weights(model) if _holds_experts(place[2], experts)]
    adapted = {id(getattr(module, "base_layer", None)) for module in ModelView(model).modules}  # by peft
    ConfigError.refuse(
        (
            not found,
            f"{type(model).__name__} has no experts in tensors of three dimensions that could be quantized",
            "bitsandbytes quantizes other weights when a model is loaded",
            "Give from_pretrained a BitsAndBytesConfig(load_in_4bit=True)",
        ),
        (
            any(isinstance(weight, DTensor) for _, _, weight in found),
            f"The experts of {type(model).__name__} lie on several ranks",
            "their scales would not",
            "Quantize them before the model is wrapped or sharded",
        ),
        (
            any(id(module) in adapted for module, _, _ in found),
            f"The experts of {type(model).__name__} have adapters (target_parameters)",
            "peft adapts no weight that is dequantized when it is read",
            "Leave target_parameters out, or leave the experts in 16 bits",
        ),
        (
            hasattr(model, PATCH),
            f"{type(model).__name__} is patched",
            "a patch knows the modules and weights that it found",
            "Call hf_burst.quantize_experts(model) before hf_burst.patch_model(model)",
        ),
    )
    for module, name, weight in found:
        setattr(module, name, _quantized(weight.detach(), quant_type, double_quant, weight.dtype))
        _parametrize(module, name)
    return model


def _experts_in(model: Any) -> int:
    return experts_of(model.config.get_text_config())[0]


def _holds_experts(weight: Tensor | None, experts: int) -> bool:
    return weight is not None and weight.ndim == 3 and min(weight.shape[1:]) > 1 and len(weight) == experts


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yields the weights of a model with their modules and names."""
    for module in ModelView(model).modules:
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                yield module, name, weight


def _quantized(weight: Tensor, quant_type: str, double_quant: bool, storage: torch.dtype) -> nn.Parameter:
    """Returns a weight in 4 bits, stored as floats, which FSDP2 can shard."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn.modules import Params4bit

    options: dict[str, Any] = {"compress_statistics": double_quant, "quant_type": quant_type, "quant_storage": storage}
    data, state = quantize_4bit(weight, **options)
    return Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **options)


def _parametrize(module: nn.Module, name: str) -> None:
    """Has reading a weight of 4 bits dequantize it."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized

    weight: Any = module._parameters[name]
    replace_parameter_4bit_prequantized(module, name, weight.quant_state.as_dict(packed=True), weight.device)
