"""Which models are served. What has not been checked to be exact is refused with a sentence."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import BatchError, UnsupportedModelError
from .served import SERVED

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")  # in the names of layer types
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_POSITION_TABLES = {"wpe", "embed_positions", "position_embeddings"}
_COUNTS_BY_MASK = "OPTForCausalLM"


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside of a peft model, or the model itself.

    Raises:
        UnsupportedModelError: If it is neither, or a wrapper that must be put on after patching.
    """
    inner: Any = model
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
    _check_parts(model)
    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", repr(model.loss_function))
        raise UnsupportedModelError(
            f"model.loss_function is {name}; over several ranks only Transformers' ForCausalLMLoss is exact. Set it "
            "back, or leave labels out and compute a loss of your own on the gathered logits."
        )
    if not _uses_loss_function(type(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its loss by itself instead of by model.loss_function, where the ranks "
            "could add theirs up."
        )
    check_router_loss(model)
    check_served(model)


def _check_parts(model: PreTrainedModel) -> None:
    """Raises for layers, inputs and masks that are not those of a causal language model."""
    config, name = model.config, type(model).__name__
    modalities = {"text_config", "vision_config", "audio_config"}.intersection(config.sub_configs)
    if modalities:
        raise UnsupportedModelError(
            f"{name} reads images or audio ({', '.join(sorted(modalities))}), which it lays over the tokens of a whole "
            "sequence. Served is text: load its language model alone, if it has one."
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are served.")
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError("config.is_causal is False; only causal language models are served.")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    chosen = [kind for kind in kinds if any(word in kind for word in _CHOOSES_KEYS)]
    if chosen:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(chosen)}, in which every query chooses its keys out of all tokens "
            f"before it. That is not exchanged between ranks; served are {', '.join(_LAYER_TYPES)}."
        )
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(kinds)}. Recurrent, convolution and linear-attention layers carry a "
            f"state from token to token, which is not exchanged between ranks; served are {', '.join(_LAYER_TYPES)}."
        )
    classes = {type(module).__name__ for module in model.modules()}
    crossing = sorted(found for found in classes if "CrossAttention" in found)
    if crossing or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(
            f"{name} has cross attention ({', '.join(crossing) or 'config.add_cross_attention is set'}), whose keys "
            "are not those of the sequence; it is not served."
        )
    if not any("Attention" in found for found in classes):
        raise UnsupportedModelError(
            f"{name} has no attention layers, so there is nothing to compute over several ranks."
        )


def _uses_loss_function(model_class: type) -> bool:
    """Whether the forward method, or one that it extends, asks `self.loss_function` for the loss."""
    methods = [vars(cls)["forward"] for cls in model_class.__mro__ if "forward" in vars(cls)]
    return any("loss_function" in inspect.unwrap(method).__code__.co_names for method in methods)


def check_router_loss(model: PreTrainedModel, asked: bool | None = None) -> None:
    """Raises for the auxiliary loss of a mixture of experts, which is no sum over tokens.

    Args:
        model (`PreTrainedModel`): The model.
        asked (`bool`, *optional*): The argument of a forward pass; by default the config's.
    """
    if getattr(model.config, "output_router_logits", False) if asked is None else asked:
        raise UnsupportedModelError(
            "output_router_logits is set, which adds the load-balancing loss of the experts. It is not a sum over "
            "tokens, so it would differ over several ranks: set config.output_router_logits=False."
        )


def check_served(model: PreTrainedModel) -> None:
    """Raises unless the class, or one that it is made from, was compared with one process."""
    own = [cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")]
    if SERVED.isdisjoint(own):
        raise UnsupportedModelError(
            f"{type(model).__name__} has not been checked to be exact over several ranks, so it is refused. The "
            "classes that are served stand in recipes/results/coverage.md."
        )


def learned_positions(model: PreTrainedModel) -> range | None:
    """The positions of which a model has embeddings; `None` for rotary ones, which know no end."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITION_TABLES.intersection(name.split(".")):
            offset = getattr(module, "offset", 0)
            return range(-offset, module.num_embeddings - offset)
        table = getattr(module, "pos_encoding", None)  # CTRL
        if isinstance(table, torch.Tensor):
            return range(len(table))
    return None


def own_positions(model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The position ids that a model makes of a whole batch that has none; `None` if they count from 0.

    Args:
        model (`PreTrainedModel`): The model.
        batch (mapping): A full batch.
    """
    table = _table_from_ids(model)
    if table is not None:
        if batch.get("input_ids") is not None:
            return table.create_position_ids_from_input_ids(batch["input_ids"], table.padding_idx)
        return table.create_position_ids_from_inputs_embeds(batch["inputs_embeds"], table.padding_idx)
    mask = batch.get("attention_mask")
    if mask is not None and any(cls.__name__ == _COUNTS_BY_MASK for cls in type(model).__mro__):
        return (mask.cumsum(dim=1) * mask - 1).long()
    return None


def check_counts_from_zero(model: PreTrainedModel) -> None:
    """Raises for models that number tokens by themselves, for a batch that was cut without knowing the model."""
    if _table_from_ids(model) is not None:
        raise BatchError(
            f"{type(model).__name__} numbers tokens from its padding_idx + 1, which shard_batch and BurstCollator do "
            "not know. Give it full batches."
        )


def _table_from_ids(model: PreTrainedModel) -> Any:
    """The embeddings of RoBERTa and its kin, which number the tokens that are not padding from `padding_idx + 1`."""
    return next((module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")), None)


def check_dropout(model: PreTrainedModel) -> None:
    """Raises for attention dropout in training: its mask would differ from that of one process."""
    for key in _DROPOUT_KEYS:
        value = getattr(model.config, key, None)
        if model.training and value:
            raise UnsupportedModelError(
                f"config.{key} is {value}; dropout of attention weights is not served in training. Load the model with "
                f"{key}=0.0 (from_pretrained(..., {key}=0.0)), which is how long-context models are trained."
            )
