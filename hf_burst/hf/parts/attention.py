"""Sets a model's attention implementation, restores it, and notices attention that bypasses hf_burst."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ConfigError, UnsupportedModelError
from ..attention import NAME, register
from ..forward_pass import Agreement, Call
from ..models.bypassed import check_attention_functions
from ..models.cut_point import reader_of
from ..models.support import has_attention
from ..view import ModelView
from .base import Handles, Part

_PATCHED: WeakKeyDictionary[PreTrainedModel, "Attention"] = WeakKeyDictionary()


def _users_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Returns other patched models that share the config object, which holds the attention implementation."""
    return (other for other in list(_PATCHED) if other is not model and other.config is model.config)


def _configs_of(reader: ModelView) -> list[PreTrainedConfig]:
    """Returns the configs that layers read their attention implementation from: copied layers have copies of it."""
    configs: list[Any] = [vars(module).get("config") for module in reader.modules]
    return list({id(config): config for config in configs if type(config) is type(reader.root.config)}.values())


def _tower_configs(view: ModelView) -> list[PreTrainedConfig]:
    """Returns the configs of everything beside the language model, such as image towers: those of modules, which may
    have been replaced, and those nested in the model's config at any depth."""
    reader = reader_of(view)
    inside = {id(module) for module in reader.modules}
    own = {id(config) for config in (view.root.config, *_configs_of(reader))}
    configs = [vars(module).get("config") for module in view.modules if id(module) not in inside]
    found = dict[int, PreTrainedConfig]()
    while configs:
        config = configs.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            configs += [getattr(config, key, None) for key in config.sub_configs]
    holds_reader = {id(config) for config in found.values() if _holds(config, reader.root.config)}
    return [config for key, config in found.items() if key not in own | holds_reader]


def _holds(config: PreTrainedConfig, inner: PreTrainedConfig) -> bool:
    """Returns whether a config contains another one."""
    return any(getattr(config, key, None) is inner for key in config.sub_configs)


class Attention(Part):
    """Sets the attention implementation, and restores it."""

    def __init__(self, view: ModelView) -> None:
        model, reader = view.root, reader_of(view)
        shared = next(_users_of(model), None)  # their config already says hf_burst
        self.before: str = reader.root.config._attn_implementation if shared is None else _PATCHED[shared].before
        if self.before == NAME:  # left by a patched model that is gone
            self.before = "sdpa" if model._supports_sdpa else "eager"
        check_attention_functions(view)
        self.attends = reader.find(has_attention)
        self.copied: list[tuple[PreTrainedConfig, str | None]] = []  # configs of copied layers, and their old values

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers the attention where a model that was saved whole, with its parts, is loaded."""
        self.__dict__.update(state)
        register()

    def install(self, view: ModelView) -> None:
        if not self.attends:
            return
        register()
        model, reader = view.root, reader_of(view)
        _PATCHED[model] = self
        self._set(view, NAME)
        if reader.root.config._attn_implementation != NAME:  # Transformers only warns
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its attention {self.before!r}: it does not use Transformers' "
                "AttentionInterface."
            )
        self._set_copies(reader)

    def look(self, view: ModelView) -> Handles:
        if not self.attends:
            return ()
        self._set_copies(reader_of(view))  # for layers that were added since
        return ()

    def admit(self, call: Call, agreement: Agreement) -> None:
        reader = reader_of(call.view).root
        if self.attends and reader.config._attn_implementation != NAME:
            raise ConfigError(
                "The attention implementation of the model was changed after it was patched, so its loss would be "
                "wrong. Call hf_burst.unpatch_model(model) first, then change it."
            )

    def remove(self, view: ModelView) -> None:
        _PATCHED.pop(view.root, None)
        if self.attends and next(_users_of(view.root), None) is None:
            self._set(view, self.before)
            for config in _configs_of(reader_of(view)):  # layers may have been copied since
                config._attn_implementation = self.before
        for config, before in self.copied:
            config._attn_implementation = before

    @staticmethod
    def _set(view: ModelView, name: str) -> None:
        """Sets the attention of the language model; towers, which see whole images, keep theirs."""
        towers = _tower_configs(view)
        before = [config._attn_implementation for config in towers]
        view.root.set_attn_implementation(name)
        for config, own in zip(towers, before, strict=True):
            config._attn_implementation = own

    def _set_copies(self, reader: ModelView) -> None:
        for config in _configs_of(reader):
            if config._attn_implementation != NAME:
                self.copied.append((config, config._attn_implementation))
                config._attn_implementation = NAME
