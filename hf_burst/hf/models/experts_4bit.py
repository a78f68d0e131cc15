"""Experts in 4 bits, by bitsandbytes.

Transformers keeps the experts of a layer in tensors of three dimensions, and quantizes `nn.Linear` alone, so that they
stay in 16 bits. Here they become weights of 4 bits that are dequantized when they are read. Checkpointed layers keep
nothing of it for the backward pass.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.import_utils import is_bitsandbytes_available
from transformers.utils.quantization_config import QuantizationMethod

from ...errors import ConfigError
from ...layers.dequantized import dequantize_when_read
from ..groups import PATCH
from ..view import ModelView
from .layer_sizes import is_experts
from .support import base_model

logger = logging.getLogger(__name__)

_METHOD = "hf_burst_experts_4bit"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that bitsandbytes quantizes
_OLDEST = "0.50.2"  # bitsandbytes that drops what has been read also when a call fails


@register_quantization_config(_METHOD)
class Experts4bitConfig(BitsAndBytesConfig):
    """`BitsAndBytesConfig` of 4 bits, which takes experts that lie in tensors of three dimensions, too.

    Each weight is quantized when it has been read, so that a GPU holds one at a time in 16 bits. The model is not
    saved; its adapters are. As a dict, give what `to_dict` returns: Transformers takes one with `load_in_4bit` for a
    `BitsAndBytesConfig`, which leaves experts in 16 bits.

    Args:
        kwargs: As in `BitsAndBytesConfig`, such as `llm_int8_skip_modules`. By default weights are `"nf4"`, and their
            scales are quantized, too (`bnb_4bit_use_double_quant=True`).

    Example:

    ```python
    >>> config = hf_burst.Experts4bitConfig(bnb_4bit_compute_dtype="bfloat16")
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", quantization_config=config, dtype="bfloat16")
    ```
    """

    def __init__(self, **kwargs: Any) -> None:
        defaults = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        given = {**defaults, **kwargs}
        given.pop("quant_method", None)
        if not given["load_in_4bit"] or given["bnb_4bit_quant_type"] not in ("nf4", "fp4"):
            what = f"Experts have load_in_4bit={given['load_in_4bit']}, type {given['bnb_4bit_quant_type']!r}"
            raise ConfigError(what, "bitsandbytes knows 4 bits of type 'nf4' and 'fp4'", "Leave both out")
        super().__init__(**given)
        self.quant_method: Any = _METHOD

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if "load_in" not in name}


@register_quantizer(_METHOD)
class Experts4bitQuantizer(Bnb4BitHfQuantizer):
    """What loads a model with an [`Experts4bitConfig`]."""

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        _check(model)
        super()._process_model_before_weight_loading(model, *args, **kwargs)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        chosen = should_convert_module(param_name.rpartition(".")[0], self.modules_to_not_convert)
        known = super().param_needs_quantization(model, param_name, **kwargs)
        return known or (chosen and is_experts(module, getattr(module, name)))

    def is_serializable(self) -> bool:
        logger.warning(
            "hf_burst: experts in 4 bits are not saved. Save adapters, and merge them into the checkpoint in 16 bits."
        )
        return False

    def get_quantize_ops(self) -> "_Quantize":
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        super()._process_model_after_weight_loading(model, **kwargs)
        model.quantization_method = QuantizationMethod.BITS_AND_BYTES  # by which trainers and peft know it
        left = set()
        for path, module, name, weight in _weights(model):
            if len(getattr(getattr(weight, "quant_state", None), "shape", ())) == 3:
                dequantize_when_read(module, name)
            elif weight.ndim == 3 and (is_experts(module, weight) or "expert" in path):
                left.add(re.sub(r"\.\d+\.", ".*.", path))
        if left:
            logger.warning("hf_burst: these experts are not in 4 bits: %s", ", ".join(sorted(left)))
        return model


class _Quantize(Bnb4bitQuantize):
    """What quantizes weights as soon as they have been read."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        quantizer, model, converted = self.hf_quantizer, kwargs["model"], dict[str, Any]()
        for path, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            own = model.get_parameter_or_buffer(path)
            if not quantizer.param_needs_quantization(model, path):
                converted[path] = value
            elif own.ndim == 3:
                converted[path] = _quantized(value.to(own.dtype), quantizer.quantization_config)
            else:
                converted |= super().convert({path: value}, *args, **kwargs)
        return converted


def quantize_experts(model: PreTrainedModel, quant_type: str = "nf4", double_quant: bool = True) -> PreTrainedModel:
    """Quantizes the experts of a model to 4 bits, where they lie in tensors of three dimensions.

    Quantize on the device on which the model computes, before [`patch_model`], peft and data-parallel wrappers. To
    load a model that fits into a GPU in 4 bits only, give `from_pretrained` an [`Experts4bitConfig`]. A tile of
    `tiled_mlp` dequantizes experts again, and [`generate`] records no CUDA graphs. The model is not saved; its adapters
    are, and are merged into the checkpoint in 16 bits.

    Args:
        model (`PreTrainedModel`): A model with experts, changed in place, such as Qwen3-MoE, Qwen3.5-MoE, Mixtral,
            GLM-4.5 or DeepSeek V3. The weights of experts no longer learn.
        quant_type (`str`, defaults to `"nf4"`): `"nf4"` or `"fp4"`.
        double_quant (`bool`, defaults to `True`): Whether the scales are quantized, too.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model has no such experts, its weights are sharded, patched or quantized already, or
            bitsandbytes cannot quantize them.

    Example:

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16", device_map="cuda")
    >>> model = hf_burst.quantize_experts(model)
    ```
    """
    config = Experts4bitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double_quant)
    inner: Any = base_model(model)
    name = type(inner).__name__
    found = [(module, own) for _, module, own, weight in _weights(inner) if is_experts(module, weight)]
    adapted = {id(getattr(module, "base_layer", None)) for module in ModelView(inner).modules}  # by peft
    ConfigError.refuse(
        (
            not found,
            f"{name} has no experts in 16 bits in tensors of three dimensions",
            "no others are quantized here",
            "Leave quantize_experts out, or load linear layers by BitsAndBytesConfig(load_in_4bit=True)",
        ),
        (
            any(id(module) in adapted for module, _ in found),
            f"The experts of {name} have adapters (target_parameters)",
            "peft adapts no weight that is dequantized when it is read",
            "Leave target_parameters out, or leave the experts in 16 bits",
        ),
        (
            hasattr(inner, PATCH),
            f"{name} is patched",
            "a patch knows the modules and weights that it found",
            "Call hf_burst.quantize_experts(model) before hf_burst.patch_model(model)",
        ),
    )
    _check(inner)
    for module, own in found:
        setattr(module, own, _quantized(getattr(module, own), config))
    inner.is_quantized, inner.hf_quantizer = True, Experts4bitQuantizer(config)
    inner.hf_quantizer._process_model_after_weight_loading(inner)
    return model


def _check(model: Any) -> None:
    """Refuses experts that cannot be quantized, before the first one is."""
    weights = [weight for _, module, _, weight in _weights(model) if is_experts(module, weight)]
    dtypes = ", ".join(sorted({str(weight.dtype) for weight in weights if weight.dtype not in _DTYPES}))
    ConfigError.refuse(
        (
            not is_bitsandbytes_available(_OLDEST),
            f"Experts in 4 bits need bitsandbytes {_OLDEST} or later",
            "older ones can keep in 16 bits what a call has read",
            f"Run pip install -U 'bitsandbytes>={_OLDEST}'",
        ),
        (
            dtypes,
            f"The experts of {type(model).__name__} are in {dtypes}",
            "bitsandbytes quantizes bfloat16, float16 and float32",
            "Load the model in one of them",
        ),
        (
            getattr(model.config, "distributed_config", None) or any(isinstance(weight, DTensor) for weight in weights),
            f"The experts of {type(model).__name__} lie on several ranks",
            "their scales would not",
            "Load the model without distributed_config and tp_plan, and quantize it before it is sharded",
        ),
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yields the weights of a model: their paths, their modules, their names in these, and themselves."""
    for path, module in ModelView(model).named:
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                yield f"{path}.{name}", module, name, weight


def _quantized(weight: Tensor, config: BitsAndBytesConfig) -> nn.Parameter:
    """Returns a weight in 4 bits, stored as floats, which FSDP2 can shard."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn.modules import Params4bit

    stored = config.bnb_4bit_quant_storage
    options: dict[str, Any] = {
        "compress_statistics": config.bnb_4bit_use_double_quant,
        "quant_type": config.bnb_4bit_quant_type,
        "quant_storage": stored if stored.is_floating_point else weight.dtype,
    }
    data, state = quantize_4bit(weight.detach(), **options)
    return Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **options)
