"""What stands in the place of a module's own method, such as its forward."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Self

from torch import nn

from ..errors import ConfigError
from .view import ModelView


class Override:
    """Stands for a method of one module, by default its forward. It does not keep the module alive, and a copy of the
    module has a copy of it.

    Args:
        module (`torch.nn.Module`): The module.
        own (callable, *optional*): What somebody had put there before; else the method is that of its class.
    """

    name = "forward"

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._module, self.own = weakref.ref(module), own

    @classmethod
    def put(cls, module: nn.Module, *given: Any) -> Self:
        """Puts one in place; returns that which is there already."""
        there = cls.of(module)
        if there is not None:
            return there
        override = cls(module, vars(module).get(cls.name), *given)
        setattr(module, override.name, override)
        return override

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """That of a module, if it has one of this kind."""
        there = vars(module).get(cls.name)
        return there if isinstance(there, cls) else None

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ConfigError("The module of this forward is gone. Keep the module, or the model, and call that.")
        return module

    @property
    def plain(self) -> Callable[..., Any]:
        """What it stands for."""
        module = self.module
        return self.own or partial(getattr(type(module), self.name), module)

    def remove(self) -> None:
        """Puts back what was there before, unless something else has come since."""
        module = self.module
        if vars(module).get(self.name) is self:
            delattr(module, self.name)
            if self.own is not None:
                setattr(module, self.name, self.own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(*(deepcopy(given, memo) for given in self._given()))

    def __reduce__(self) -> Any:
        return type(self), self._given()

    def _given(self) -> tuple[Any, ...]:
        """What one like it is made of."""
        return self.module, self.own


def remove_overrides(view: ModelView) -> None:
    """Takes away those of all modules, also of copies that adapters have made since."""
    for module in view.modules:
        for there in list(vars(module).values()):
            while isinstance(there, Override):
                there.remove()
                there = there.own
