"""Replacements for a module's own methods, such as its forward."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType
from typing import Any, Self

from torch import nn

from ..errors import ConfigError
from .view import ModelView


class Override:
    """A replacement for one method of a module, by default its forward. It does not keep the module alive, and a copy
    of the module has a copy of it. `own` is what the module had in this place before, if not the method of its class;
    `more` are further arguments of the kind, for copies.
    """

    name = "forward"

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, *more: Any) -> None:
        self._module, self.own, self.more = weakref.ref(module), own, more

    @classmethod
    def put(cls, module: nn.Module, *given: Any) -> Self:
        """Puts an override in place, or returns the one that is already there."""
        there = cls.of(module)
        if there is not None:
            return there
        override = cls(module, vars(module).get(cls.name), *given)
        setattr(module, override.name, override)
        return override

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Returns the module's override of this kind, also if somebody's wrapper calls it, or `None`."""
        found = _called_by(vars(module).get(cls.name), set())
        return next((there for there in found if isinstance(there, cls) and there._module() is module), None)

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ConfigError("The module of this forward is gone. Keep the module, or the model, and call that.")
        return module

    @property
    def plain(self) -> Callable[..., Any]:
        """The method that it replaces."""
        module = self.module
        return self.own or partial(getattr(type(module), self.name), module)

    def remove(self) -> None:
        """Restores what was there before, unless something else has replaced it since."""
        module = self.module
        if vars(module).get(self.name) is self:
            delattr(module, self.name)
            if self.own is not None:
                setattr(module, self.name, self.own)

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.own, *self.more)


def _called_by(function: Any, met: set[int]) -> Iterator[Any]:
    """Yields a function and what it calls, outermost first, as far as attributes and closures of wrappers tell."""
    if callable(function) and id(function) not in met:
        met.add(id(function))
        yield function
        names = ("own", "func", "__wrapped__", "__func__")[0 if isinstance(function, Override | partial) else 2 :]
        cells = getattr(function, "__closure__", None) or ()
        inner = (cell.cell_contents for cell in cells if cell != CellType())  # without empty cells
        for there in (*(getattr(function, name, None) for name in names), *inner):
            yield from _called_by(there, met)


def remove_overrides(view: ModelView) -> None:
    """Removes the overrides of all modules, also of copies that adapters have made."""
    for module in view.modules:
        for there in list(vars(module).values()):
            while isinstance(there, Override):
                there.remove()
                there = there.own
