"""Layers that carry a state from token to token: their functions compute over the ranks, for this model alone."""

import inspect
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError, UnsupportedModelError
from ..attention import CALL_KEY
from ..recurrent import Function, Scope, in_place_of_innermost, over_ranks, recurrent_modules
from .base import ForwardPass, Handles, Part


class Recurrence(Part):
    """Gives recurrent modules a `forward` of their own, and the layers around them one that tells them of the pass,
    inside of what is checkpointed: a backward pass that runs a layer again tells them, too."""

    def install(self, model: PreTrainedModel) -> Handles:
        for module in _concerned(model):
            if "forward" in vars(module):
                raise UnsupportedModelError(
                    f"The forward of a {type(module).__name__} was replaced before the model was patched. Patch the "
                    "model first."
                )
            _bind(module)
        return ()

    def prepare(self, run: ForwardPass) -> None:
        for module in _concerned(run.model):
            own = vars(module).get("forward")
            if own is None or own == MethodType(type(module).forward, module):  # of a model that was saved whole
                _bind(module)
            elif not _is_ours(own):
                raise ConfigError(
                    f"The forward of a {type(module).__name__} was replaced after the model was patched, so its state "
                    "would not pass from rank to rank. Unpatch the model, then patch it anew."
                )

    def remove(self, model: PreTrainedModel) -> None:
        for module in _concerned(model):
            if _is_ours(vars(module).get("forward")):
                del module.forward


def _concerned(model: nn.Module) -> list[nn.Module]:
    """The recurrent modules, and the layers that hold them."""
    modules = recurrent_modules(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    around = {inner: layer for layer in layers for inner in recurrent_modules(layer)}
    for module in modules:
        if around.get(module, module) is module:
            raise UnsupportedModelError(
                f"A {type(module).__name__} is in no layer that Transformers can checkpoint, by which it would learn "
                "how the sequence is sharded."
            )
    return [*modules, *dict.fromkeys(around.values())]


def _bind(module: Any) -> None:
    """Gives a module the forward of a sharded pass, which in others is as before."""
    forward = _told if isinstance(module, GradientCheckpointingLayer) else _sharded(type(module).forward, module)
    module.forward = MethodType(forward, module)


def _is_ours(forward: Any) -> bool:
    return forward is not None and (hasattr(forward, "scope") or getattr(forward, "__func__", None) is _told)


def _sharded(plain: Any, module: nn.Module) -> Function:
    """The forward of a recurrent module."""
    scope = Scope()
    sharded, masks = over_ranks(module, scope), "attention_mask" in inspect.signature(plain).parameters

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(CALL_KEY, None)
        if scope.call is None:
            return plain(self, *args, **kwargs)
        if masks:
            kwargs["attention_mask"] = scope.call.real
        try:
            return sharded(self, *args, **kwargs)
        finally:
            scope.call = None

    forward.scope = scope  # type: ignore[attr-defined]
    return forward


def _told(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer. Its class is looked up in each pass: FSDP2 changes it."""
    return _telling(type(self).forward)(self, *args, **kwargs)


_told.__name__ = "forward"  # by which the method is found where a model that was saved whole is loaded


@lru_cache
def _telling(function: Any) -> Any:
    """The forward of a class, which tells the recurrent modules of a layer of the pass, or of none."""

    def make(inner: FunctionType) -> Function:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            modules: list[Any] = recurrent_modules(self)
            for module in modules:
                module.forward.scope.call = kwargs.get(CALL_KEY)
            return inner(self, *args, **kwargs)

        return forward

    return in_place_of_innermost(function, make)
