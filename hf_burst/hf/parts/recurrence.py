"""Layers that carry a state from token to token: their functions compute over the ranks, for this model alone."""

import inspect
import logging
from functools import cache
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError, UnsupportedModelError
from ..attention import CALL_KEY
from ..recurrent import Function, Scope, in_place_of_innermost, over_ranks, recurrent_modules
from .base import ForwardPass, Handles, Part

logger = logging.getLogger(__name__)

_CACHES = ("cache_params", "past_key_values")


class Recurrence(Part):
    """Gives recurrent modules a `forward` of their own, and the layers around them one that tells them of the pass,
    inside of what is checkpointed: a backward pass that runs a layer again tells them, too."""

    def __init__(self) -> None:
        self.told: list[Any] = []  # the layers that know of the pass
        self.warned = False

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
            elif not hasattr(own, "scope"):
                raise ConfigError(
                    f"The forward of a {type(module).__name__} was replaced after the model was patched, so its state "
                    "would not pass from rank to rank. Unpatch the model, then patch it anew."
                )

    def begin(self, run: ForwardPass) -> None:
        self.told = [module for module in _concerned(run.model) if isinstance(module, GradientCheckpointingLayer)]
        for layer in self.told:
            layer.forward.scope.call = run.call
        if self.told and run.device.type == "cuda" and run.group.size > 1 and not self.warned:
            self.warned = True
            logger.warning(
                "Recurrent layers over ranks were compared with one process on CPUs. Their kernels for GPUs were not: "
                "compare the loss of a batch of yours by hf-burst check --batch."
            )

    def end(self) -> None:
        for layer in self.told:
            layer.forward.scope.call = None
        self.told = []

    def remove(self, model: PreTrainedModel) -> None:
        for module in _concerned(model):
            if hasattr(vars(module).get("forward"), "scope"):
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
    make = _telling if isinstance(module, GradientCheckpointingLayer) else _sharded
    module.forward = MethodType(make(module), module)


def _sharded(module: nn.Module) -> Function:
    """The forward of a recurrent module."""
    scope, plain = Scope(), type(module).forward
    sharded, masks = over_ranks(module, scope), "attention_mask" in inspect.signature(plain).parameters

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(CALL_KEY, None)
        if scope.call is None:
            return plain(self, *args, **kwargs)
        if masks:
            kwargs["attention_mask"] = scope.call.real
        kwargs |= {name: None for name in _CACHES if name in kwargs}  # it would hold the states of a shard
        try:
            return sharded(self, *args, **kwargs)
        finally:
            scope.call = None

    forward.scope = scope  # type: ignore[attr-defined]
    return forward


def _telling(layer: nn.Module) -> Function:
    """The forward of a layer around recurrent modules. Some models do not hand on what they are given by name: what
    their layers are not told is told here."""
    scope = Scope()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault(CALL_KEY, scope.call)
        kind: Any = type(self)  # FSDP2 changes it
        return _telling_inside(kind.forward)(self, *args, **kwargs)

    forward.scope = scope  # type: ignore[attr-defined]
    return forward


@cache
def _telling_inside(function: Any) -> Any:
    """The forward of a class, which tells the recurrent modules of a layer of the pass, or of none."""

    def make(inner: FunctionType) -> Function:
        named = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(inner).parameters.values()
        )

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = kwargs.pop(CALL_KEY)
            modules: list[Any] = recurrent_modules(self)
            for module in modules:
                module.forward.scope.call = call
            given = {CALL_KEY: call} if named and call is not None else {}
            return inner(self, *args, **kwargs, **given)

        return forward

    return in_place_of_innermost(function, make)
