"""Which models are served. What has not been checked to be exact is refused with a sentence."""

import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ..errors import UnsupportedModelError
from ..loss import IGNORE_INDEX
from ..plan import MaskPattern
from .verdicts import served_by

logger = logging.getLogger(__name__)

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")  # in the names of layer types
# settings by which the embeddings of an encoder read further than their own token
_WHOLE_SEQUENCE = {
    "token_dropout": "scales embeddings by the share of masked tokens in the whole sequence",
    "trigram_input": "adds the embeddings of the neighbouring tokens of a sequence",
}
# methods of peft whose layers treat each token by itself; tried as models are, see tests/test_wrappers.py
PEFT_METHODS = frozenset(
    {
        *("BEFT", "C3A", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR"),
        *("LORA", "MISS", "OFT", "OSF", "PSOFT", "ROAD", "TINYLORA", "TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT"),
        "XLORA",
    }
)
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


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


def check_adapters(model: nn.Module) -> None:
    """Raises for adapters of peft that are not served exactly; whether the model was patched before or after.

    Raises:
        UnsupportedModelError: With the method that is not served.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        method = getattr(config.peft_type, "value", config.peft_type)
        if method not in PEFT_METHODS or getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA (alora_invocation_tokens)" if method in PEFT_METHODS else method
            raise UnsupportedModelError(
                f"The adapter {name!r} is of the peft method {kind}, which has not been found exact where every rank "
                f"holds a part of the tokens. Served are {', '.join(sorted(PEFT_METHODS))}."
            )


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a model is a causal language model, or else a masked one (`...ForMaskedLM`), by its loss function."""
    return model.loss_function is not ForMaskedLMLoss


def calls_loss_function(model: PreTrainedModel) -> bool:
    """Whether the model's class computes its loss by `model.loss_function`, or else by itself."""
    return any("loss_function" in forward.__code__.co_names for forward in _forwards(model))


def _forwards(model: PreTrainedModel) -> list[Any]:
    return [inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls)]


def check_model(model: PreTrainedModel) -> str:
    """By which comparison a model is served, see [`served_by`]; raises unless every setting is served exactly.

    Raises:
        UnsupportedModelError: With the setting that is not served.
    """
    causal = is_causal(model)
    _check_parts(model, causal)
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use Transformers' AttentionInterface, the door by which its attention "
            "could be swapped."
        )
    if not any("labels" in inspect.signature(forward).parameters for forward in _forwards(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no labels, so it has no loss to learn from; load the class with a "
            "language-model head (AutoModelForCausalLM, AutoModelForMaskedLM)."
        )
    if causal and model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", repr(model.loss_function))
        raise UnsupportedModelError(
            f"model.loss_function is {name}; over several ranks only Transformers' ForCausalLMLoss and "
            "ForMaskedLMLoss are exact. Load the class with a language-model head. If the loss was set, set it back, "
            "or leave labels out and compute a loss of your own on the gathered logits."
        )
    if causal and not calls_loss_function(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its loss by itself instead of by model.loss_function, where the ranks "
            "could add theirs up."
        )
    served = served_by(model)
    if served == "shipped" and not type(model).forward.__module__.startswith("transformers."):
        logger.warning(
            "%s has a forward of its own, and what that computes over tokens, beside what it calls in Transformers, is "
            "computed over the tokens of one rank only. hf_burst.check_model(model) compares it with one process.",
            type(model).__name__,
        )
    return served


def _check_parts(model: PreTrainedModel, causal: bool) -> None:
    """Raises for layers, inputs and masks that are not those of a language model that reads text."""
    config, name = model.config, type(model).__name__
    modalities = {"text_config", "vision_config", "audio_config"}.intersection(config.sub_configs)
    if modalities:
        raise UnsupportedModelError(
            f"{name} has parts beside a language model ({', '.join(sorted(modalities))}), and what they read is laid "
            "over the tokens of a whole sequence. Served is text: load its language model alone, if it has one."
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders and encoders alone are served.")
    if causal:
        _check_causal(model)
    else:
        _check_masked(model)
    kinds = sorted(set(_layer_types(config)) - set(_LAYER_TYPES))
    chosen = [kind for kind in kinds if any(word in kind for word in _CHOOSES_KEYS)]
    if chosen:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(chosen)}, in which every query chooses its keys out of all tokens "
            f"before it. That is not exchanged between ranks; served are {', '.join(_LAYER_TYPES)}."
        )
    kinds = [kind for kind in kinds if kind not in ("mlp", "moe")] or kinds
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
    if not any("Attention" in found or "MLA" in found for found in classes):
        raise UnsupportedModelError(
            f"{name} has no attention layers, so there is nothing to compute over several ranks."
        )


def _check_causal(model: PreTrainedModel) -> None:
    """Raises for a model whose tokens see later ones, and that is not made to predict masked ones."""
    config, name = model.config, type(model).__name__
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"config.is_causal is False, and {name} is not a masked language model.")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(
            f"config.use_bidirectional_attention is {config.use_bidirectional_attention}, and {name} is not a masked "
            "language model. Set it to False."
        )
    if any(hasattr(module, "is_decoder") and not module.is_decoder for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} was made as an encoder, whose tokens see later ones. Of encoders, those that predict masked "
            "tokens are served (AutoModelForMaskedLM); for a decoder, make it with is_decoder=True in its config."
        )


def _check_masked(model: PreTrainedModel) -> None:
    """Raises for a masked language model that is not an encoder, or that mixes tokens elsewhere than in attention."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_decoder", False):
        raise UnsupportedModelError(
            f"{name} was made as a decoder, whose tokens see no later ones. Make it with is_decoder=False in its "
            "config, or load its class with a causal language-model head (AutoModelForCausalLM)."
        )
    for setting, why in _WHOLE_SEQUENCE.items():
        if getattr(config, setting, False):
            raise UnsupportedModelError(
                f"config.{setting} is {getattr(config, setting)}: {name} {why}, of which a rank has a part. Only "
                "models made with it switched off are served."
            )
    ignored = getattr(config, "sparse_pred_ignore_index", IGNORE_INDEX)
    if getattr(config, "sparse_prediction", False) and ignored != IGNORE_INDEX:
        raise UnsupportedModelError(
            f"config.sparse_pred_ignore_index is {ignored}; only {IGNORE_INDEX} is served with sparse_prediction."
        )


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    """What kinds of layers a config names; RecurrentGemma names them otherwise in Transformers 5.17."""
    return getattr(config, "layer_types", None) or getattr(config, "block_types", None) or ()


def layer_patterns(config: PreTrainedConfig, causal: bool = True) -> Counter[MaskPattern]:
    """How many layers of a model see how far, by its config: what the chunks of a batch are balanced for. A config that
    names nothing known counts as one whose layers see whole documents. A causal window counts the query, that of an
    encoder, which is as wide on both sides, does not."""
    config = config.get_text_config()
    types = _layer_types(config) or ["sliding_attention"] * config.num_hidden_layers
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(types)
    return Counter(_pattern(layer, kind, causal) for layer, kind in zip(each, types, strict=True))


def _pattern(config: PreTrainedConfig, kind: str, causal: bool) -> MaskPattern:
    """What the queries of a layer of this kind see."""
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return MaskPattern(causal, window - causal if isinstance(window, int) and window > 0 else None, chunk)


def check_noise(model: PreTrainedModel) -> None:
    """Raises for noise on embeddings (NEFTune), whose size follows from the length of a sequence."""
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        raise UnsupportedModelError(
            "neftune_noise_alpha adds noise that depends on the length of the sequence, of which a rank has a part. "
            "Leave it out of the training arguments."
        )


def check_dropout(model: PreTrainedModel) -> None:
    """Raises for attention dropout in training: its mask would differ from that of one process."""
    for key in _DROPOUT_KEYS:
        value = getattr(model.config, key, None)
        if model.training and value:
            raise UnsupportedModelError(
                f"config.{key} is {value}; dropout of attention weights is not served in training. Load the model with "
                f"{key}=0.0 (from_pretrained(..., {key}=0.0)), which is how long-context models are trained."
            )
