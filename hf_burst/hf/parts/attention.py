"""Sets a model's attention implementation, restores it, and notices attention that bypasses hf_burst."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ConfigError
from ..attention import NAME, register
from ..forward_pass import Call
from ..models.bypassed import check_attention_functions
from ..models.cut_point import reader_of
from ..models.support import has_attention
from ..view import ModelView
from .base import Handles, Part

register()  # also where a model that was saved whole, with its parts, is loaded


@dataclass
class Before:
    """The attention implementation of a model before it was patched, and those of configs that said otherwise."""

    name: str
    changed: list[tuple[PreTrainedConfig, str | None]] = field(default_factory=list)


_PATCHED: WeakKeyDictionary[PreTrainedModel, Before] = WeakKeyDictionary()


def _users_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Returns other patched models that share the config object, which holds the attention implementation."""
    return (other for other in list(_PATCHED) if other is not model and other.config is model.config)


def _configs_of(view: ModelView) -> list[PreTrainedConfig]:
    """Returns the configs of the language model, of which copied layers have copies, and those of models around it;
    towers, which see whole images, keep their attention."""
    reader = reader_of(view)
    path = next(path for path, module in view.named if module is reader.root)
    around = [module for outer, module in view.named if not outer or f"{path}.".startswith(f"{outer}.")]
    configs: list[Any] = [vars(module).get("config") for module in (*around, *reader.modules)]
    kinds = type(reader.root.config), *(type(module.config) for module in around if hasattr(module, "config"))
    return list({id(config): config for config in configs if type(config) in kinds}.values())


class Attention(Part):
    """Sets the attention implementation, and restores it."""

    def __init__(self, view: ModelView) -> None:
        model, reader = view.root, reader_of(view)
        shared = next(_users_of(model), None)  # their config already says hf_burst
        self.before = Before(reader.root.config._attn_implementation if shared is None else _PATCHED[shared].name)
        if self.before.name == NAME:  # left by a patched model that is gone
            self.before.name = "sdpa" if model._supports_sdpa else "eager"
        check_attention_functions(view)
        self.attends = reader.find(has_attention)

    def look(self, view: ModelView) -> Handles:
        if self.attends:
            _PATCHED[view.root] = self.before
        for config in _configs_of(view) if self.attends else ():  # layers may have been added since
            if config._attn_implementation != NAME:
                self.before.changed.append((config, config._attn_implementation))
                config._attn_implementation_internal = NAME
        return ()

    def admit(self, call: Call) -> None:
        reader = reader_of(call.view).root
        if self.attends and reader.config._attn_implementation != NAME:
            raise ConfigError(
                "The attention implementation of the model was changed after it was patched, so its loss would be "
                "wrong. Call hf_burst.unpatch_model(model) first, then change it."
            )

    def remove(self, view: ModelView) -> None:
        _PATCHED.pop(view.root, None)
        other = next(_users_of(view.root), None)
        if other is not None:
            _PATCHED[other].changed += self.before.changed
        elif self.attends:
            for config in _configs_of(view):  # layers may have been copied since
                config._attn_implementation_internal = self.before.name
            for config, before in self.before.changed:
                config._attn_implementation_internal = before
