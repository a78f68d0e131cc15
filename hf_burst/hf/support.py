"""Which models are served. What has not been checked to be exact is refused with a sentence."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import UnsupportedModelError

# model classes whose loss and gradients are compared with one process, by the tests of hf_burst
SERVED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
}
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop")


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside of a peft model, or the model itself.

    Raises:
        UnsupportedModelError: If it is neither, or a wrapper that must be put on after patching.
    """
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile
    if hasattr(inner, "get_base_model"):  # peft
        method = getattr(inner, "active_peft_config", None)
        if method is not None and method.is_prompt_learning:
            raise UnsupportedModelError(
                f"The peft method {method.peft_type} prepends virtual tokens on every rank, which cannot be sharded. "
                "Use LoRA or another method that changes weights."
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        hint = ""
        if hasattr(model, "module"):
            hint = " Pass the model inside: patch it before it is wrapped (accelerator.prepare), unpatch model.module."
        raise UnsupportedModelError(
            f"hf_burst takes a Transformers model, or a peft model of one, got {type(model).__name__}.{hint}"
        )
    return inner


def check_model(model: PreTrainedModel) -> None:
    """Raises unless every setting of the model is served exactly.

    Raises:
        UnsupportedModelError: With the setting that is not served.
    """
    config = model.config
    classes = {(cls.__module__, cls.__name__) for cls in type(model).__mro__}
    if not any((f"transformers.models.{kind}.modeling_{kind}", name) in classes for kind, name in SERVED.items()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has not been checked to be exact over several ranks, so it is refused. Served are "
            f"{', '.join(SERVED.values())}."
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if layer_types:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(layer_types))}; served are "
            f"{', '.join(_LAYER_TYPES)}."
        )
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("config.add_cross_attention is set; cross attention is not served.")
    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", repr(model.loss_function))
        raise UnsupportedModelError(
            f"model.loss_function is {name}; over several ranks only Transformers' ForCausalLMLoss is exact. Set it "
            "back, or leave labels out and compute a loss of your own on the gathered logits."
        )
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError("config.is_causal is False; only causal language models are served.")


def check_dropout(model: PreTrainedModel) -> None:
    """Raises for attention dropout in training: its mask would differ from that of one process."""
    for key in _DROPOUT_KEYS:
        value = getattr(model.config, key, None)
        if model.training and value:
            raise UnsupportedModelError(
                f"config.{key} is {value}; dropout of attention weights is not served in training. Load the model with "
                f"{key}=0.0 (from_pretrained(..., {key}=0.0)), which is how long-context models are trained."
            )
