"""Which adapters of peft work in a model."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..view import ModelView


def adapted_modules(view: ModelView) -> list[tuple[str, nn.Module]]:
    """Returns the modules that [`is_adapted`] accepts, and their paths."""
    return [(path, module) for path, module in view.named if is_adapted(module)]


def is_adapted(module: nn.Module) -> bool:
    """Returns whether a module has adapters, or is one of those that adapters save (`modules_to_save`)."""
    return hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters")


def adapters_at_work(module: Any) -> list[str]:
    """Returns which adapters of a module work, which are merged, and their scales; empty if there are none."""
    active, merged, scales = _active(module), getattr(module, "merged_adapters", []), getattr(module, "scaling", None)
    scales = [scales.get(name) for name in active] if isinstance(scales, Mapping) else scales
    return [str(active), str(merged), str(scales)] if active or merged else []


def idle_weights(module: Any) -> Iterator[Tensor]:
    """Yields the weights and buffers of a module's adapters that do not work."""
    names = (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
    every: list[Any] = [getattr(module, name, None) for name in names]
    for held in every:
        for name, value in held.items() if hasattr(held, "items") else ():
            if name not in _active(module):
                yield from (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else (value,)


def _active(module: Any) -> list[str]:
    return [] if module.disable_adapters else list(module.active_adapters)
