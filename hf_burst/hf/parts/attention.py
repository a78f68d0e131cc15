"""The attention of a model: set and put back, and told of every sharded pass."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError, UnsupportedModelError
from ...resources import resources_of
from ..attention import CALL_KEY, NAME, LazyMask, register
from ..cutting import language_model_of
from ..support import has_attention
from .base import ForwardPass, Handles, Part

_PATCHED: WeakKeyDictionary[PreTrainedModel, "Attention"] = WeakKeyDictionary()


def _users_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Other patched models that were made of the same config object, which holds the attention implementation."""
    return (other for other in list(_PATCHED) if other is not model and other.config is model.config)


def _configs_of(reader: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that layers read their attention implementation from: copies of layers have copies of it."""
    found, modules = dict[int, PreTrainedConfig](), list[nn.Module]([reader])
    while modules:  # `model.modules()` takes several times as long, at every pass
        module = modules.pop()
        config = vars(module).get("config")
        if type(config) is type(reader.config):
            found[id(config)] = config
        modules += [child for child in module._modules.values() if child is not None]
    return list(found.values())


class Attention(Part):
    """Sets the attention implementation, and sees to it that the call of a pass comes to the attention of every layer.

    The call is a keyword argument, which some layers do not pass on to their attention. They pass on the mask, so that
    carries it too. A model that does not pass it on to its layers is refused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        reader = language_model_of(model)
        shared = next(_users_of(model), None)  # their config says hf_burst already
        self.before: str = reader.config._attn_implementation if shared is None else _PATCHED[shared].before
        if self.before == NAME:  # of a patched model that is gone
            self.before = "sdpa" if model._supports_sdpa else "eager"
        self.under_way, self.attends = False, has_attention(reader)
        self.copied: list[tuple[PreTrainedConfig, str | None]] = []  # configs of copied layers, and what they said

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A model saved whole brings its parts along, and the attention must be known where it is loaded."""
        self.__dict__.update(state)
        register()

    def install(self, model: PreTrainedModel) -> Handles:
        if not self.attends:
            return ()
        register()
        _PATCHED[model] = self
        model.set_attn_implementation(NAME)
        reader = language_model_of(model)
        if reader.config._attn_implementation != NAME:  # Transformers only warns
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its attention {self.before!r}: it does not use Transformers' "
                "AttentionInterface."
            )
        self._set_copies(reader)
        layers = (module for module in reader.modules() if isinstance(module, GradientCheckpointingLayer))
        return [
            layer.register_forward_pre_hook(self._carry, with_kwargs=True) for layer in layers if has_attention(layer)
        ]

    def prepare(self, run: ForwardPass) -> None:
        reader = language_model_of(run.model)
        if self.attends and reader.config._attn_implementation != NAME:
            raise ConfigError(
                "The attention implementation of the model was changed after it was patched, so its loss would be "
                "wrong. Call hf_burst.unpatch_model(model) first, then change it."
            )
        if self.attends:
            self._set_copies(reader)  # of layers that were added since
        resources_of(run.group).check()

    def begin(self, run: ForwardPass) -> None:
        self.under_way = True

    def end(self) -> None:
        self.under_way = False

    def remove(self, model: PreTrainedModel) -> None:
        _PATCHED.pop(model, None)
        if self.attends and next(_users_of(model), None) is None:
            model.set_attn_implementation(self.before)
            since = [(config, self.before) for config in _configs_of(language_model_of(model))]
            for config, before in [*since, *self.copied]:  # layers may have been copied since
                config._attn_implementation = before

    def _set_copies(self, reader: PreTrainedModel) -> None:
        for config in _configs_of(reader):
            if config._attn_implementation != NAME:
                self.copied.append((config, config._attn_implementation))
                config._attn_implementation = NAME

    def _carry(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, mask = kwargs.get(CALL_KEY), kwargs.get("attention_mask")
        if self.under_way and call is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} is not given the keyword arguments of its model, by which it would learn how "
                "the sequence is sharded. Another version of Transformers may pass them on."
            )
        if isinstance(mask, LazyMask):
            mask.call = call
