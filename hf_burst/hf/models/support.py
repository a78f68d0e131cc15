"""Models that are never supported, whatever a comparison finds: each rule says what, why, and what instead."""

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ...layers.dequantized import Dequantized
from ...plan import MaskPattern
from ..admission import LAYERS
from ..view import ModelView
from .bypassed import check_recurrent_sources
from .cut_point import modalities_of, reader_of
from .recurrent import COUNTERPARTS, recurrent_modules
from .task import ALONE, CAUSAL, Reason, Task, computes_loss, forwards_of, task_of

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_WHOLE_IN_TRAINING = "reference_sliding_attention"  # its window counts generated tokens, and always sees the prompt
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})  # every token costs the same
_EXPERT_EXCHANGES = ("auto", "all_to_all")  # Transformers' expert parallelism that sends tokens to their experts' ranks
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")  # words in layer types


def base_model(model: nn.Module) -> PreTrainedModel:
    """Returns the Transformers model inside a peft model, or the model itself; raises for other models and wrappers."""
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile
    if hasattr(inner, "get_base_model"):  # peft
        method = getattr(inner, "active_peft_config", None)
        if method is not None and method.is_prompt_learning:
            raise UnsupportedModelError(
                f"The peft method {method.peft_type} is not served",
                "it prepends virtual tokens on every rank, which cannot be sharded",
                "Use LoRA or another method that changes weights",
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"hf_burst takes a Transformers model, or a peft model of one, got {type(model).__name__}",
            "it is none",
            "Pass the model inside of a wrapper: patch it before accelerator.prepare, unpatch model.module",
        )
    return inner


def check_model(view: ModelView) -> None:
    """Raises an UnsupportedModelError for layers and settings that are never supported."""
    for reason in _reasons(view):
        raise UnsupportedModelError(*reason)


def _reasons(view: ModelView) -> Iterator[Reason]:
    """Yields the reasons why a model is not supported."""
    model, task, reader = view.root, view.find(task_of), reader_of(view)
    config, name, modalities = model.config, type(model).__name__, modalities_of(model.config)
    calling, served = f"layers that call {', '.join(COUNTERPARTS)}", ", ".join(_LAYER_TYPES)
    if modalities and reader.root is model:
        parts = f"{name} has several parts ({', '.join(modalities)})"
        yield parts, "none is known as its language model", "Name it by hf_burst.admit(model_class, cut=...)"
    if modalities and (needed := ", ".join(_needed(model))):
        yield f"{name} takes no batch of text", f"its forward requires {needed}, which no rank can cut", ALONE
    if config.is_encoder_decoder:
        yield f"{name} is an encoder-decoder", "its decoder attends to another sequence", ALONE
    classes = {kind.__name__ for kind in reader.classes}
    crossing = sorted(kind for kind in classes if "CrossAttention" in kind)
    if crossing or getattr(config, "add_cross_attention", False):
        found = ", ".join(crossing) or "config.add_cross_attention is set"
        yield f"{name} has cross attention ({found})", "its keys are not those of the sequence", ALONE
    yield from _placement(getattr(config, "distributed_config", None), name)
    targets = (getattr(own, "target_parameters", None) for own in getattr(model, "peft_config", {}).values())
    adapted = [parameters for parameters in targets if parameters]
    if adapted and Dequantized in view.classes:
        why = "peft finds no weight that is dequantized when it is read"
        yield f"{name} has experts in 4 bits, and target_parameters={sorted(adapted[0])}", why, "Adapt attention alone"
    yield from task.reasons(view)
    kinds = sorted(set(_layer_types(config.get_text_config())) - {*_LAYER_TYPES, _WHOLE_IN_TRAINING})
    chosen = ", ".join(kind for kind in kinds if any(word in kind for word in _CHOOSES_KEYS))
    if chosen:
        why = "every query chooses its keys out of all tokens before it, which ranks do not exchange"
        yield f"{name} has layers of type {chosen}", why, f"Served are {served}"
    if own := ", ".join(sorted(kind for kind in classes if LAYERS.get(kind) == "state")):
        why = f"{own} carries a state from token to token inside of its own forward"
        yield f"{name} is not served", why, f"Served are {calling}"
    check_recurrent_sources(reader)
    recurrent = reader.find(recurrent_modules)
    kinds = [kind for kind in kinds if kind not in ("mlp", "moe")] or kinds
    if kinds and not recurrent:
        why = "they carry a state from token to token by no function that is known"
        yield f"{name} has layers of type {', '.join(kinds)}", why, f"Served are {served}, and {calling}"
    attends = reader.find(has_attention)
    if not attends and not recurrent:
        what = f"{name} has no attention, and no recurrent layers whose states are known how to pass"
        yield what, f"those are {calling}", ALONE
    if attends and not reader.root._can_set_attn_implementation():
        yield f"{name} does not use Transformers' AttentionInterface", "its attention cannot be replaced", ALONE
    if not task.reads and not any("labels" in inspect.signature(forward).parameters for forward in forwards_of(model)):
        yield f"{name} takes no labels", "it has no loss to learn from", "Load the class with a language-model head"
    if not task.reads:
        yield from task.loss_reasons(computes_loss(view))


def _placement(placed: Any, name: str) -> Iterator[Reason]:
    """Yields reasons against a model that Transformers' `DistributedConfig` has divided. FSDP2 is supported, and so is
    expert parallelism that sends tokens to their experts."""
    given = {size: n for size in ("tp_size", "pp_size", "ep_size") if (n := getattr(placed, size, 1) or 1) > 1}
    way = getattr(placed, "ep_implementation", None)
    if given.keys() & {"tp_size", "pp_size"} or (given and way not in _EXPERT_EXCHANGES):
        sizes = ", ".join(f"{key}={value!r}" for key, value in {**given, "ep_implementation": way}.items())
        yield (
            f"{name} was loaded with DistributedConfig({sizes})",
            "its ranks hold parts of layers, or experts to which tokens do not travel",
            "Served is DistributedConfig(fsdp_size=N, ep_size=M), with an ep_implementation of "
            f"{' or '.join(map(repr, _EXPERT_EXCHANGES))} of Transformers from 5.23 on",
        )


def _needed(model: PreTrainedModel) -> list[str]:
    """Returns the required arguments of a model's forward, except `input_ids`."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [each.name for each in named if each.default is each.empty and each.name != "input_ids"]


def has_attention(view: ModelView) -> bool:
    """Returns whether a model or layer has attention, according to its class names."""
    return any(map(is_attention, view.classes))


def is_attention(kind: type) -> bool:
    """Returns whether a module class is attention, or a layer around it, according to its name."""
    name = kind.__name__
    return ("Attention" in name or "MLA" in name) and LAYERS.get(name) != "no attention"


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """Returns the layer types that a config names; RecurrentGemma's attribute differs in Transformers 5.17."""
    return list(getattr(config, "layer_types", None) or getattr(config, "block_types", None) or ())


def layer_patterns(config: PreTrainedConfig, task: Task = CAUSAL) -> Counter[MaskPattern]:
    """Counts a model's layers by mask pattern, for balancing the chunks of a batch. Layers of unknown types count as
    seeing whole documents; layers without attention are left out."""
    return Counter(pattern for _, pattern in patterns_of_layers(config, task))


def patterns_of_layers(config: PreTrainedConfig, task: Task) -> list[tuple[PreTrainedConfig, MaskPattern]]:
    """Returns the config and mask pattern of each layer that has attention."""
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
