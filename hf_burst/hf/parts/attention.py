"""The attention of a model: set and put back, and noticed where it goes past us."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ConfigError, UnsupportedModelError
from ...ring.resources import resources_of
from ..attention import ARRIVED, NAME, register
from ..forward_pass import Agreement, Call, ForwardPass
from ..models.bypassed import attention_modules, check_attention_functions, forward_name, function_name
from ..models.cut_point import reader_of
from ..models.support import has_attention
from ..view import ModelView, inner_modules
from .base import Handles, Part

_PATCHED: WeakKeyDictionary[PreTrainedModel, "Attention"] = WeakKeyDictionary()


def _users_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Other patched models that were made of the same config object, which holds the attention implementation."""
    return (other for other in list(_PATCHED) if other is not model and other.config is model.config)


def _configs_of(reader: ModelView) -> list[PreTrainedConfig]:
    """The configs that layers read their attention implementation from: copies of layers have copies of it."""
    configs: list[Any] = [vars(module).get("config") for module in reader.modules]
    return list({id(config): config for config in configs if type(config) is type(reader.root.config)}.values())


def _tower_configs(view: ModelView) -> list[PreTrainedConfig]:
    """The configs of what stands beside a language model, such as towers for images: of modules, which may have been
    replaced, and those that the model's config holds at any depth."""
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
    """Whether a config has another one inside."""
    return any(getattr(config, key, None) is inner for key in config.sub_configs)


def _arrived_inside(module: nn.Module) -> list[nn.Module]:
    """The modules that have arrived inside of one whose class, from elsewhere, leaves it to them to attend."""
    return [inner for inner in inner_modules(module) if getattr(inner, ARRIVED, False)]


class _Hooks:
    """The hook of modules that attend. It holds no module, so that a model is freed when it is let go."""

    def __init__(self) -> None:
        self.under_way = self.ran = False  # whether a pass is, and whether a module that attends ran in it
        self.paths: dict[int, str] = {}  # of the modules that attend, by their ids

    def check_arrived(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of a module that attends. In a compiled graph nothing is left of it: what it asks is
        answered when the graph is made."""
        if self.under_way:
            arrived = [module] if getattr(module, ARRIVED) else _arrived_inside(module)
            if not arrived:
                self._refuse(module)
            for inner in arrived:
                setattr(inner, ARRIVED, False)
            if not torch.compiler.is_compiling():  # a graph may not change what lies outside of a checkpoint
                self.ran = True

    @torch.compiler.disable
    def _refuse(self, module: nn.Module) -> None:
        raise ConfigError(
            f"{type(module).__name__} ({self.paths.get(id(module), 'of a copied model')}) ran without the attention "
            f"function of hf_burst, so each rank would attend to its own tokens alone. Its forward is "
            f"{forward_name(module)}. If a package replaced it, or that of its layer, as patches of attention, of "
            "rotary positions and of windows do, switch that off. A class of your own has to call the function that "
            "Transformers' ALL_ATTENTION_FUNCTIONS names, with all keyword arguments that it is given."
        )


class Attention(Part):
    """Sets the attention implementation. An attention module that ran in a pass, and did not call our function, is an
    error."""

    def __init__(self, view: ModelView) -> None:
        model, reader = view.root, reader_of(view)
        shared = next(_users_of(model), None)  # their config says hf_burst already
        self.before: str = reader.root.config._attn_implementation if shared is None else _PATCHED[shared].before
        if self.before == NAME:  # of a patched model that is gone
            self.before = "sdpa" if model._supports_sdpa else "eager"
        check_attention_functions(view)
        self.attends, self.hooks = reader.find(has_attention), _Hooks()
        self.modules: list[nn.Module] = []  # those that attend
        self.copied: list[tuple[PreTrainedConfig, str | None]] = []  # configs of copied layers, and what they said

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A model saved whole brings its parts along, and the attention must be known where it is loaded."""
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
        reader = reader_of(view)
        self._set_copies(reader)  # of layers that were added since
        attending = reader.find(attention_modules)
        self.modules, self.hooks.paths = list(attending), {id(module): path for module, path in attending.items()}
        return [module.register_forward_hook(self.hooks.check_arrived) for module in self.modules]

    def admit(self, call: Call, agreement: Agreement) -> None:
        reader = reader_of(call.view).root
        if self.attends and reader.config._attn_implementation != NAME:
            raise ConfigError(
                "The attention implementation of the model was changed after it was patched, so its loss would be "
                "wrong. Call hf_burst.unpatch_model(model) first, then change it."
            )
        forwards = (vars(module).get("forward") or type(module).forward for module in self.modules)
        distinct = {id(forward): forward for forward in forwards}
        names = sorted({function_name(forward) for forward in distinct.values()})
        agreement.add("forward of attention", names, "Replace or wrap it on all ranks, or on none.")
        resources_of(call.group).check()

    def begin(self, run: ForwardPass) -> None:
        self.hooks.under_way, self.hooks.ran = True, run.call.compiled
        for module in self.modules:
            vars(module)[ARRIVED] = False

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        if self.hooks.ran or any(vars(module)[ARRIVED] for module in self.modules):
            return
        decoder = reader_of(run.call.view).root.base_model
        forwards = map(forward_name, (run.model, decoder, *run.call.view.part(decoder).layers))
        other = next((name for name in forwards if not name.startswith(("transformers.", "hf_burst."))), None)
        if self.modules and other is not None:
            raise ConfigError(
                f"The model computed without its attention modules, by {other}, so each rank would know its "
                "own tokens alone. Put back the forward of the class: it calls the layers, and they their attention."
            )

    def end(self) -> None:
        self.hooks.under_way = False

    def remove(self, view: ModelView) -> None:
        _PATCHED.pop(view.root, None)
        for module in view.modules:
            vars(module).pop(ARRIVED, None)
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
