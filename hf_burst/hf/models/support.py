"""Which models are served. What has not been checked to be exact is refused with a sentence."""

import inspect
import logging
from collections import Counter
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ...plan import MaskPattern
from ..view import ModelView
from .bypassed import check_recurrent_sources
from .cut_point import modalities_of, reader_of
from .recurrent import COUNTERPARTS, recurrent_modules
from .task import CAUSAL, Task, computes_loss, forwards_of, task_of
from .verdicts import own_classes, served_by

logger = logging.getLogger(__name__)

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_WHOLE_IN_TRAINING = "reference_sliding_attention"  # whose window is of generated tokens, and sees the prompt beside it
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})  # a token's work is that of any other
_NO_ATTENTION = {"RwkvSelfAttention"}  # but by its name
# recurrent classes that compute their states inside of their own forward
_WITHOUT_FUNCTION = {"MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "ZayaCCAProjection"}
_EXPERT_EXCHANGES = ("auto", "all_to_all")  # of Transformers, by which tokens travel to the ranks of their experts
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")  # in the names of layer types


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside of a peft model, or the model itself; raises for other models and wrappers."""
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
        hint = " Pass the model inside: patch it before it is wrapped (accelerator.prepare), unpatch model.module."
        raise UnsupportedModelError(
            f"hf_burst takes a Transformers model, or a peft model of one, got {type(model).__name__}."
            f"{hint if hasattr(model, 'module') else ''}"
        )
    return inner


def check_model(view: ModelView) -> None:
    """Raises for layers and settings that are never served, whatever a comparison of the class would find.

    Raises:
        UnsupportedModelError: With the setting that is not served.
    """
    model, task, reader = view.root, view.find(task_of), reader_of(view)
    config, name, modalities = model.config, type(model).__name__, modalities_of(model.config)
    if modalities and reader.root is model:
        raise UnsupportedModelError(
            f"{name} has several parts ({', '.join(modalities)}), and none is known as its language model, which takes "
            "the embeddings of all tokens. No part of it is served."
        )
    if modalities and (needed := _needed(model)):
        raise UnsupportedModelError(
            f"{name} takes no batch of text: its forward requires {', '.join(needed)}, which no rank can cut."
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders and encoders alone are served.")
    classes = {kind.__name__ for kind in reader.classes}
    crossing = sorted(kind for kind in classes if "CrossAttention" in kind)
    if crossing or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(
            f"{name} has cross attention ({', '.join(crossing) or 'config.add_cross_attention is set'}), whose keys "
            "are not those of the sequence; it is not served."
        )
    _check_placement(getattr(config, "distributed_config", None), name)
    task.check_model(view)
    kinds = sorted(set(_layer_types(config.get_text_config())) - {*_LAYER_TYPES, _WHOLE_IN_TRAINING})
    chosen = [kind for kind in kinds if any(word in kind for word in _CHOOSES_KEYS)]
    if chosen:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(chosen)}, in which every query chooses its keys out of all tokens "
            f"before it. That is not exchanged between ranks; served are {', '.join(_LAYER_TYPES)}."
        )
    if own := sorted(classes & _WITHOUT_FUNCTION):
        raise UnsupportedModelError(
            f"{name} is not served: {', '.join(own)} carries a state from token to token inside of its own forward, "
            f"and hf_burst passes states between ranks only for layers that call {', '.join(COUNTERPARTS)}. Train it "
            "on sequences that one GPU holds."
        )
    check_recurrent_sources(reader)
    recurrent = reader.find(recurrent_modules)
    kinds = [kind for kind in kinds if kind not in ("mlp", "moe")] or kinds
    if kinds and not recurrent:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(kinds)}, which carry a state from token to token by no function "
            f"that is known. Served are {', '.join(_LAYER_TYPES)}, and layers that call {', '.join(COUNTERPARTS)}."
        )
    attends = reader.find(has_attention)
    if not attends and not recurrent:
        raise UnsupportedModelError(
            f"{name} has no attention, and no recurrent layers whose states are known how to pass: those that call "
            f"{', '.join(COUNTERPARTS)}. Train it on sequences that one GPU holds."
        )
    if attends and not reader.root._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} does not use Transformers' AttentionInterface, by which its attention would be replaced."
        )
    if not task.reads and not any("labels" in inspect.signature(forward).parameters for forward in forwards_of(model)):
        raise UnsupportedModelError(
            f"{name} takes no labels, so it has no loss to learn from; load the class with a "
            "language-model head (AutoModelForCausalLM, AutoModelForMaskedLM)."
        )
    if not task.reads:
        task.check_loss(computes_loss(model, reader.root))


def _check_placement(placed: Any, name: str) -> None:
    """Raises for a model that Transformers' `DistributedConfig` has divided in a way that is not served. FSDP2 is, and
    experts of which each rank has some, if tokens travel to them."""
    sizes = {size: getattr(placed, size, 1) or 1 for size in ("tp_size", "pp_size", "ep_size")}
    given = f"{name} was loaded with DistributedConfig({', '.join(f'{key}={n}' for key, n in sizes.items() if n > 1)})"
    if sizes["tp_size"] > 1 and sizes["ep_size"] > 1:
        raise UnsupportedModelError(
            f"{given}, in which the ranks of tp_size hold the same tokens: they add up what their experts return "
            "(AllReduceEP), or take a part of these tokens each. Ranks that share a sequence hold different ones. Load "
            "it with DistributedConfig(fsdp_size=N, ep_size=M), by which tokens travel to the ranks of their experts."
        )
    if sizes["tp_size"] > 1 or sizes["pp_size"] > 1:
        raise UnsupportedModelError(
            f"{given}, by which ranks hold parts of layers. Beside ranks that share a sequence this was not compared "
            "with one process. Load the model without it, and have FSDP2 shard the weights."
        )
    way = getattr(placed, "ep_implementation", None)
    if sizes["ep_size"] > 1 and way not in _EXPERT_EXCHANGES:
        raise UnsupportedModelError(
            f"{given} and ep_implementation={way!r}. Ranks that share a sequence hold different tokens, which must "
            f"travel to the ranks of their experts and back: served are {' and '.join(map(repr, _EXPERT_EXCHANGES))}, "
            "in versions of Transformers that have them (5.23 has)."
        )


def _needed(model: PreTrainedModel) -> list[str]:
    """The arguments besides tokens without which a model cannot be called."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [each.name for each in named if each.default is each.empty and each.name != "input_ids"]


def has_attention(view: ModelView) -> bool:
    """Whether a model, or a layer of it, has attention, by the names of its classes."""
    return any(map(is_attention, view.classes))


def is_attention(kind: type) -> bool:
    """Whether a class of modules is attention, or a layer around it, by its name."""
    name = kind.__name__
    return name not in _NO_ATTENTION and ("Attention" in name or "MLA" in name)


def verdict_on(view: ModelView) -> str:
    """By which comparison a model is served, see [`served_by`]; warns of classes that it does not cover."""
    model, served = view.root, served_by(view)
    own = [kind.__qualname__ for kind in view.find(own_classes)]
    if not type(model).forward.__module__.startswith("transformers."):
        own = own or [f"{type(model).__qualname__}.forward"]
    if own and served == "shipped":
        logger.warning(
            "From outside of Transformers, and not compared with one process: %s. Whatever it computes over tokens is "
            "computed over those of one rank only. Compare it: run hf-burst check, or hf_burst.check_model(model).",
            ", ".join(own),
        )
    return served


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers that a config names; RecurrentGemma names them otherwise in Transformers 5.17."""
    return list(getattr(config, "layer_types", None) or getattr(config, "block_types", None) or ())


def layer_patterns(config: PreTrainedConfig, task: Task = CAUSAL) -> Counter[MaskPattern]:
    """How many layers of a model see how far, by its config: the chunks of a batch are balanced for this. Layers of
    unknown kinds count as seeing whole documents, and those without attention not at all."""
    return Counter(pattern for _, pattern in patterns_of_layers(config, task))


def patterns_of_layers(config: PreTrainedConfig, task: Task = CAUSAL) -> list[tuple[PreTrainedConfig, MaskPattern]]:
    """The config of each layer of a model that has attention, and how far it sees."""
    config = config.get_text_config()
    types = _layer_types(config) or ["sliding_attention"] * config.num_hidden_layers
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(types)
    pairs = zip(layers, types, strict=True)
    return [(layer, _pattern(layer, kind, task)) for layer, kind in pairs if kind not in _WITHOUT_ATTENTION]


def _pattern(config: PreTrainedConfig, kind: str, task: Task) -> MaskPattern:
    window = getattr(config, "sliding_window", None) if kind in ("sliding_attention", "hybrid_sliding") else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    visible = task.window(window) if isinstance(window, int) and window > 0 else None
    return MaskPattern(task.causal, visible, chunk)
