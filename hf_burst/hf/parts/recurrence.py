"""Layers that carry a state from token to token: their functions compute over the ranks, for this model alone."""

import inspect
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError, UnsupportedModelError
from ..attention import CALL_KEY
from ..recurrent import Scope, rebound, recurrent_layers
from .base import ForwardPass, Handles, Part


class Recurrence(Part):
    """Rebinds the `forward` of recurrent modules. The layer around them tells them of the pass, also when a backward
    pass runs it again."""

    def install(self, model: PreTrainedModel) -> Handles:
        modules = recurrent_layers(model)
        for module in modules:
            if "forward" in vars(module):
                raise UnsupportedModelError(
                    f"The forward of a {type(module).__name__} was replaced before the model was patched. Patch the "
                    "model first."
                )
            _bind(module)
        handles, told = [], set[nn.Module]()
        for layer in model.modules():
            inside = recurrent_layers(layer) if isinstance(layer, GradientCheckpointingLayer) else []
            if inside:
                handles.append(layer.register_forward_pre_hook(partial(_tell, inside), with_kwargs=True))
                told.update(inside)
        for module in modules:
            if module not in told:
                raise UnsupportedModelError(
                    f"A {type(module).__name__} is in no layer that Transformers can checkpoint, by which it would learn "
                    "how the sequence is sharded."
                )
        return handles

    def prepare(self, run: ForwardPass) -> None:
        for module in recurrent_layers(run.model):
            own = vars(module).get("forward")
            if own is None or own == MethodType(type(module).forward, module):  # of a model that was saved whole
                _bind(module)
            elif not hasattr(own, "scope"):
                raise ConfigError(
                    f"The forward of a {type(module).__name__} was replaced after the model was patched, so its state "
                    "would not pass from rank to rank. Unpatch the model, then patch it anew."
                )

    def remove(self, model: PreTrainedModel) -> None:
        for module in recurrent_layers(model):
            if hasattr(vars(module).get("forward"), "scope"):
                del module.forward


def _bind(module: nn.Module) -> None:
    """Gives a module a forward that computes over ranks in a sharded pass, and as before in others."""
    scope, plain = Scope(), type(module).forward
    over_ranks = rebound(module, scope)
    masks = "attention_mask" in inspect.signature(plain).parameters

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if scope.call is None:
            return plain(self, *args, **kwargs)
        if masks:
            kwargs["attention_mask"] = scope.call.real
        try:
            return over_ranks(self, *args, **kwargs)
        finally:
            scope.call = None

    forward.scope = scope  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)


def _tell(modules: list[Any], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook of a layer: tells the modules inside of the pass, or of none."""
    for module in modules:
        module.forward.scope.call = kwargs.get(CALL_KEY)
