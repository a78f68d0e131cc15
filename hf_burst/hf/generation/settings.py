"""Settings of answers over ranks: the patched model, unsupported arguments, and what ranks must have in common."""

import inspect
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from ...errors import BatchError, BurstError, ConfigError, UnsupportedModelError
from ...layers.surroundings import instead
from ...ranks.group import ContextGroup
from ..batches.documents import CACHE_KEYS, batch_shape
from ..groups import PATCH, resolve_group
from ..models.recurrent import functions_of, recurrent_modules
from ..parts.expert_ranks import check_same_passes
from ..view import ModelView, find_inside, inner_modules, is_partitioned

_SETTINGS = frozenset(vars(GenerationConfig()))  # settings that may be tensors, such as eos_token_id
_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
_WHOLE = "model.generate holds the whole prompt on each rank."
OF_OTHER_CACHES = ("cache_implementation", "prefill_chunk_size")  # passed over if configs say so
# unsupported arguments of `model.generate`, and the reason or alternative
_REFUSED = {
    **dict.fromkeys(CACHE_KEYS, "The cache over ranks is made here."),
    "cache_implementation": "The cache over ranks is made here.",
    "prefill_chunk_size": "The prompt is cut over the ranks instead.",
    "assistant_model": "Ranks would have to hold its whole prompt.",
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "assistant_early_exit"), "Ranks keep no tokens that can be taken back."
    ),
    "output_attentions": "Attention weights are never in memory.",
    "negative_prompt_ids": "Two prompts at once are not served.",
    "custom_generate": "Decoding by a function of another kind is not served.",
    "synced_gpus": "Ranks of a group stop together anyway.",
}


def patched(model: nn.Module) -> tuple[PreTrainedModel, ContextGroup]:
    """Returns the patched model inside a model, and the ranks that share its sequences.

    Raises:
        ConfigError: If no model inside is patched.
    """
    found = find_inside(model, PATCH)
    if found is None:
        raise ConfigError("This takes a patched model. Call hf_burst.patch_model(model) first.")
    return found, resolve_group(getattr(found, PATCH).group)


def outermost(model: nn.Module) -> nn.Module:
    """Returns what to call for a pass of the patched model inside a model: around it, as for adapters, FSDP2 may gather
    weights, too."""
    units: list[Any] = list(ModelView(model).units_of_fsdp2)
    return next((unit for unit in units if find_inside(unit, PATCH)), patched(model)[0])


def check(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raises for unsupported models and arguments."""
    cache_key(model)
    for problem in _problems(model, kwargs):
        raise problem
    check_same_passes(model, resolve_group(getattr(model, PATCH).group))
    batch_shape(kwargs)


def _problems(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> Iterator[BurstError]:
    """Yields what is not supported of a model, and of the arguments of `model.generate`."""
    name = type(model).__name__
    if model.training:
        yield ConfigError("The model is in training, where dropout would change its answers. Call model.eval() first.")
    recurrent = recurrent_modules(ModelView(model))
    scans = {type(each).__name__ for each in recurrent if "mamba_selective_scan" in functions_of(type(each).forward)}
    if scans:
        yield UnsupportedModelError(
            f"{name} has {', '.join(sorted(scans))}, whose kernels return no state behind a prompt that lies over "
            f"ranks. {_WHOLE}"
        )
    if getattr(model.config.get_text_config(), "n_recurrent_loops", 1) > 1:  # Dory's
        yield UnsupportedModelError(
            f"{name} runs layers in loops, each of which would need a cache of its own over the ranks. {_WHOLE}"
        )
    if is_partitioned(model):
        yield UnsupportedModelError(
            "DeepSpeed ZeRO-3 shards the weights, and would gather them for each token. Take FSDP2, or a smaller stage."
        )
    for key, why in _REFUSED.items():
        given = kwargs.get(key) if key in OF_OTHER_CACHES else setting(model, kwargs, key)
        if given is not None if key in CACHE_KEYS else given:  # an empty cache is falsy
            yield ConfigError(f"generate over ranks was given {key}={_short(given)}. {why} Leave it out.")
    if kwargs.get("use_cache") is not None and not kwargs["use_cache"]:
        yield ConfigError("generate over ranks was given use_cache=False. It needs its cache. Leave it out.")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = setting(model, kwargs, key)
        if token is not None and torch.as_tensor(token).is_floating_point():
            yield ConfigError(f"{key} is {_short(token)}. Give integers.")
    if not isinstance(kwargs.get("stopping_criteria") or [], list | tuple):
        yield ConfigError(f"stopping_criteria is a {_short(kwargs['stopping_criteria'])}; give a list of them.")
    others = [name for name in prompt_tensors(kwargs) if name not in _TEXT]
    if others:
        yield BatchError(f"generate over ranks takes text, and was given {', '.join(others)}. Use model.generate.")


def cache_key(model: PreTrainedModel) -> str:
    """Returns the name of a model's cache argument; raises if there is none."""
    taken = inspect.signature(type(model).forward).parameters
    for key in CACHE_KEYS:
        if key in taken:
            return key
    raise UnsupportedModelError(f"{type(model).__name__} takes no cache, by which its keys would be shared. {_WHOLE}")


def setting(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    """Returns a generation setting, from the arguments, their config or the model's config, in this order."""
    configs = kwargs.get("generation_config"), model.generation_config
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def copies_of(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> int:
    """Returns how many rows `generate` makes of each prompt."""
    return max(int(setting(model, kwargs, name) or 1) for name in ("num_beams", "num_return_sequences"))


def prompt_tensors(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the names of tensors that hold a value per prompt or token."""
    return [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _SETTINGS]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and restores the mode of each module afterwards."""
    training = [module for module in inner_modules(model) if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def with_settings(kwargs: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Returns arguments of `model.generate` with other settings: in their config if they have one, because Transformers
    warns of settings beside it."""
    config = kwargs.get("generation_config")
    if config is None:
        return {**kwargs, **settings}
    return {**kwargs, "generation_config": GenerationConfig(**{**config.to_dict(), **settings})}


def without_rope_deltas(model: nn.Module) -> AbstractContextManager[None]:
    """Removes `rope_deltas` from a model, and restores them afterwards. Transformers keeps there how far images moved
    later positions, and adds it whenever a cache is not empty."""
    return instead(None, "rope_deltas", *(module for module in inner_modules(model) if "rope_deltas" in vars(module)))


def settings_of(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings that must be equal on all ranks, without prompts and first-rank objects."""
    others = ("streamer", "stopping_criteria", *prompt_tensors(kwargs))
    return {name: _short(value) for name, value in kwargs.items() if name not in others}


def _short(value: Any) -> str:
    """Returns a comparable text of a value: content for plain values, configs and tokenizers, else the class name."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return _short(value.tolist())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    if hasattr(value, "get_vocab"):  # a tokenizer, for stop_strings
        words = sorted(value.get_vocab().items())
        return f"{type(value).__name__} of {len(words)} tokens (checksum {zlib.crc32(str(words).encode()):x})"
    if hasattr(value, "to_dict"):  # a GenerationConfig, or a part of one
        given = {name: _short(each) for name, each in value.to_dict().items() if each is not None}
        return f"{type(value).__name__} {given}"
    plain = value is None or isinstance(value, str | int | float | bool | dict)
    return str(value) if plain else type(value).__name__
