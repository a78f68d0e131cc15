"""Experts in 4 bits, by bitsandbytes.

Transformers keeps the experts of a layer in tensors of three dimensions, and quantizes `nn.Linear` alone, so that they
stay in 16 bits. Here they become weights of 4 bits that are dequantized when they are read. Checkpointed layers keep
nothing of it for the backward pass.
"""

import logging
import re
from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from ...errors import ConfigError
from ...layers.dequantized import Dequantized, dequantize_when_read
from ..view import ModelView
from .layer_sizes import is_experts

logger = logging.getLogger(__name__)

_METHOD = "hf_burst_experts_4bit"
_INSTEAD = "Save adapters, and merge them into the checkpoint in 16 bits"


@register_quantization_config(_METHOD)
class Experts4bitConfig(BitsAndBytesConfig):
    """`BitsAndBytesConfig` of 4 bits, which takes experts that lie in tensors of three dimensions, too.

    It loads checkpoints in 16 bits, such as those of Qwen3-MoE, Qwen3.5-MoE, Mixtral and GLM-4.5-Air. Each weight is
    quantized when it has been read, so that a GPU never holds the model in 16 bits. A model that is made from a config
    is saved first (`save_pretrained`), and loaded with this.

    Experts are dequantized when a layer runs: of one layer at a time with `gradient_checkpointing=True` or in tiles
    (`tiled_mlp`, each of which dequantizes them again), else the backward pass needs those of all layers in 16 bits.
    [`generate`] dequantizes all experts for each token, and records no CUDA graphs.

    The model is not saved; its adapters are. A state dict has no scales: load it only into a model of the same base. As
    a dict, give what `to_dict` returns: Transformers takes one with `load_in_4bit` for a `BitsAndBytesConfig`, which
    leaves experts in 16 bits.

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
        if not given["load_in_4bit"]:
            instead = "Leave it out, or take BitsAndBytesConfig, which leaves experts in 16 bits"
            raise ConfigError("Experts4bitConfig has load_in_4bit=False", "it quantizes to 4 bits", instead)
        if (kind := given["bnb_4bit_quant_type"]) not in ("nf4", "fp4"):
            raise ConfigError(f"bnb_4bit_quant_type is {kind!r}", "it can be 'nf4' or 'fp4'", "Give one of them")
        super().__init__(**given)
        self.quant_method: Any = _METHOD

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if "load_in" not in name}


@register_quantizer(_METHOD)
class Experts4bitQuantizer(Bnb4BitHfQuantizer):
    """What loads a model with an [`Experts4bitConfig`]."""

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        name = type(model).__name__
        weights = [(get_module_from_name(model, path)[0], weight) for path, weight in model.named_parameters()]
        most = max((weight.numel() for module, weight in weights if is_experts(module, weight)), default=0)
        ConfigError.refuse(
            (
                most >= 2**31,
                f"The experts of a layer of {name} are a tensor of {most:,} weights",
                "bitsandbytes counts them in 32 bits",
                "Load the model by BitsAndBytesConfig, which leaves experts in 16 bits",
            ),
            (
                getattr(model.config, "distributed_config", None),
                f"The experts of {name} lie on several ranks",
                "their scales would not",
                "Load the model without distributed_config and tp_plan, and shard it then",
            ),
        )
        super()._process_model_before_weight_loading(model, *args, **kwargs)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        chosen = should_convert_module(param_name.rpartition(".")[0], self.modules_to_not_convert)
        known = super().param_needs_quantization(model, param_name, **kwargs)
        return known or (chosen and is_experts(module, getattr(module, name)))

    def is_serializable(self) -> bool:
        logger.warning("hf_burst: experts in 4 bits are not saved. %s.", _INSTEAD)
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        raise ConfigError("Experts in 4 bits are not dequantized", "Transformers knows linear layers", _INSTEAD)

    def get_quantize_ops(self) -> "_Quantize":
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> PreTrainedModel:
        super()._process_model_after_weight_loading(model, **kwargs)
        model.quantization_method = QuantizationMethod.BITS_AND_BYTES  # by which trainers and peft know it
        left = set()
        for path, weight in list(model.named_parameters()):
            module, name = get_module_from_name(model, path)
            if len(getattr(getattr(weight, "quant_state", None), "shape", ())) == 3:
                dequantize_when_read(module, name)
            elif weight.ndim == 3 and (is_experts(module, weight) or "expert" in path):
                left.add(re.sub(r"\.\d+\.", ".*.", path))
        if left:
            logger.warning("hf_burst: these experts are not in 4 bits: %s", ", ".join(sorted(left)))
        elif Dequantized not in ModelView(model).classes:
            why = "hf_burst: %s has no experts in tensors of three dimensions; BitsAndBytesConfig does the same for it."
            logger.warning(why, type(model).__name__)
        return model


class _Quantize(Bnb4bitQuantize):
    """What quantizes weights as soon as they have been read."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        from bitsandbytes.nn.modules import Params4bit

        quantizer, model, converted = self.hf_quantizer, kwargs["model"], dict[str, Any]()
        config = quantizer.quantization_config
        stored = config.bnb_4bit_quant_storage
        for path, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            own = model.get_parameter_or_buffer(path)
            if not quantizer.param_needs_quantization(model, path):
                converted[path] = value
            elif own.ndim == 3:
                weight: Any = Params4bit(
                    value.to(own.dtype),
                    requires_grad=False,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                    quant_storage=stored if stored.is_floating_point else own.dtype,  # which FSDP2 can shard
                )
                converted[path] = weight.to(value.device)
            else:
                converted |= super().convert({path: value}, *args, **kwargs)
        return converted
