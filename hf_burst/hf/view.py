"""The modules of a model. No other code of `hf/` walks over modules.

    view = ModelView(model)         walks once; the patch makes a new view when modules have changed
    view.modules, view.named        depth first, the model first
    view.part(module)               the view of an inner module
    view.where(is_adapter)          the modules that a function accepts, evaluated once per view
    view.find(recurrent_modules)    what a function finds in a view, evaluated once per view

Modes, hooks and which weights learn may change while modules stay, so they are read from these lists.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ConfigError

Found = TypeVar("Found")


class ModelView:
    """The modules of a model, or of a part of one, at one time. It does not keep the model alive, and a copy of it
    belongs to no model."""

    def __init__(self, root: nn.Module) -> None:
        self._known = [(path, weakref.ref(module)) for path, module in root.named_modules()]
        self._found: dict[Any, Any] = {}

    @property
    def root(self) -> Any:
        root = self._known[0][1]()
        if root is None:
            raise ConfigError("The model of this view is gone. Keep the model.")
        return root

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, the root first."""
        return [module for _, module in self.named]

    @property
    def named(self) -> list[tuple[str, nn.Module]]:
        """All modules with their paths."""
        pairs = [("", self.root), *((path, known()) for path, known in self._known[1:])]
        return [(path, module) for path, module in pairs if module is not None]

    @property
    def layers(self) -> list[GradientCheckpointingLayer]:
        """The modules that Transformers knows as layers and that can checkpoint."""
        return [module for module in self.modules if isinstance(module, GradientCheckpointingLayer)]

    @property
    def classes(self) -> set[type[nn.Module]]:
        return set(map(type, self.modules))

    @property
    def units_of_fsdp2(self) -> list[FSDPModule]:
        """The modules whose weights FSDP2 gathers together; FSDP2 changes their classes in place."""
        return [module for module in self.modules if isinstance(module, FSDPModule)]

    def part(self, module: nn.Module) -> "ModelView":
        """Returns the view of an inner module."""
        return self if module is self.root else self._once(("part", id(module)), lambda: ModelView(module))

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """Returns a module and those inside it."""
        return self.part(module).modules

    def find(self, what: "Callable[[ModelView], Found]") -> Found:
        """Returns what a function finds in this view, computed once. The result must not be the root or this view,
        because a model that holds its view would then hold itself."""
        return self._once(what, lambda: what(self))

    def where(self, holds: Callable[[nn.Module], bool]) -> list[Any]:
        """Returns the modules for which `holds` is true, evaluated once; the view does not keep them alive."""
        places = self._once(holds, lambda: [place for place, module in enumerate(self.modules) if holds(module)])
        return [module for place in places if (module := self._known[place][1]()) is not None]

    def is_of(self, modules: list[nn.Module]) -> bool:
        """Returns whether these are its modules, as [`walk`] returns them."""
        return [known() for _, known in self._known] == modules

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def __reduce__(self) -> Any:
        return ModelView, (nn.Module(),)


def walk(model: nn.Module) -> tuple[list[nn.Module], bool]:
    """Returns the modules of a model, as a view keeps them, and whether torch compiles one of them."""
    met, compiled, found = dict[nn.Module, None](), False, list[nn.Module | None]([model])
    while found:  # `model.modules()` takes several times as long, in each pass
        module = found.pop()
        if module is not None and module not in met:
            met[module] = None
            if module._modules:
                found += reversed(module._modules.values())
                compiled |= "_orig_mod" in module._modules
            compiled |= module._compiled_call_impl is not None
    return list(met), compiled


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model computes and its ranks communicate: that of its weights, or the one to which
    FSDP2 brings weights that wait on the host (`CPUOffloadPolicy`)."""
    weight = next(model.parameters())
    kind = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device.type
    if kind == weight.device.type:
        return weight.device
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)


def has_language_head(view: ModelView) -> bool:
    """Returns whether a model, or one inside it, has a language-model head, unlike classifiers and bare decoders."""
    models = (module for module in view.modules if isinstance(module, PreTrainedModel))
    return any(model.get_output_embeddings() is not None for model in models)


def inner_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Returns a module and those inside it, for code that runs within a layer and has no view."""
    return module.modules()


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the direct children of a module, by name."""
    return {name: child for name, child in module._modules.items() if child is not None}


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Returns the hooks on a module's calls and on their gradients."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [*hooks, *module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def own_modules(layer: nn.Module) -> list[nn.Module]:
    """Returns the modules inside a layer, itself first, without those of layers nested in it."""
    found = [layer, *children_of(layer).values()]
    for module in found[1:]:
        if not isinstance(module, GradientCheckpointingLayer):
            found += own_modules(module)[1:]
    return found


def is_partitioned(module: nn.Module) -> bool:
    """Returns whether DeepSpeed ZeRO-3 shards the weights, which are then empty outside their own module's call."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_sharded_head(head: nn.Module | None) -> bool:
    """Returns whether FSDP2 shards a head."""
    return head is not None and any(isinstance(weight, DTensor) for weight in head.parameters())


def find_inside(model: nn.Module, attribute: str) -> Any:
    """Returns the first module of any model, wrapped or not, that itself has an attribute, such as a patch."""
    return next((module for module in model.modules() if attribute in vars(module)), None)
