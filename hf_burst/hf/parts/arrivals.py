"""Checks that the layers that mix tokens reached hf_burst: else each rank would see its own tokens alone."""

from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ..attention import ARRIVED
from ..forward_pass import Call, ForwardPass
from ..models.bypassed import attention_modules, forward_name
from ..models.cut_point import reader_of
from ..models.recurrent import is_recurrent, recurrent_modules
from ..models.support import has_attention
from ..view import ModelView, inner_modules, own_modules
from .base import Handles, Outputs, Part


class Arrivals(Part):
    """Counts the modules that reached hf_burst in a pass. Attention modules are marked in its attention function,
    recurrent modules in its forward. An attention module, or a layer with a recurrent one, that ran without a mark is
    an error."""

    def __init__(self) -> None:
        self.under_way = self.ran = False  # whether a pass is, and whether an attention module ran in it

    def look(self, view: ModelView) -> Handles:
        handles = [module.register_forward_hook(self._attended) for module in _attending(view)]
        return handles + [layer.register_forward_hook(self._passed) for layer in view.layers if _stateful(layer)]

    def admit(self, call: Call) -> None:
        names = set(map(forward_name, _attending(call.view)))
        call.agreement.add("forward of attention", sorted(names), "Replace or wrap it on all ranks, or on none.")

    def begin(self, run: ForwardPass) -> None:
        self.under_way, self.ran = True, run.call.compiled
        for module in (*_attending(run.call.view), *run.call.view.find(recurrent_modules)):
            vars(module)[ARRIVED] = False

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        view, attending = run.call.view, _attending(run.call.view)
        if self.ran or any(vars(module)[ARRIVED] for module in attending):
            return
        decoder = reader_of(view).root.base_model
        forwards = map(forward_name, (view.root, decoder, *view.part(decoder).layers))
        other = next((name for name in forwards if not name.startswith(("transformers.", "hf_burst."))), None)
        if attending and other is not None:
            raise ConfigError(
                f"The model computed without its attention modules, by {other}, so each rank would know its "
                "own tokens alone. Put back the forward of the class: it calls the layers, and they their attention."
            )

    def end(self) -> None:
        self.under_way = False

    def remove(self, view: ModelView) -> None:
        for module in view.modules:
            vars(module).pop(ARRIVED, None)

    def _attended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Checks an attention module. A compiled graph holds nothing of this hook: it is evaluated when the graph is
        made."""
        if not self.under_way:
            return
        # a custom class may leave attention to inner modules
        modules = [module] if getattr(module, ARRIVED) else inner_modules(module)
        arrived = [inner for inner in modules if getattr(inner, ARRIVED, False)]
        if not arrived:
            _refuse(module)
        for inner in arrived:
            setattr(inner, ARRIVED, False)
        if not torch.compiler.is_compiling():  # a graph may not change state outside a checkpoint
            self.ran = True

    @torch.compiler.disable
    def _passed(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Checks a layer with recurrent modules, of each kind of them. peft has copies of those that it saves, of which
        one runs."""
        modules = _stateful(layer) if self.under_way else []
        arrived = {type(module) for module in modules if vars(module)[ARRIVED]}
        for module in modules:
            if type(module) not in arrived:
                _refuse(module)
            vars(module)[ARRIVED] = False


@torch.compiler.disable
def _refuse(module: nn.Module) -> None:
    raise ConfigError(
        f"{type(module).__name__} was passed by: hf_burst did not compute it, so each rank would know its own tokens "
        f"alone. Its forward is {forward_name(module)}. If a package replaced it, or that of its layer, as patches of "
        "attention, of rotary positions and of windows do, switch that off, or unpatch the model and patch it anew. A "
        "class of your own has to call the function that Transformers' ALL_ATTENTION_FUNCTIONS names, with all keyword "
        "arguments that it is given."
    )


def _attending(view: ModelView) -> list[nn.Module]:
    reader = reader_of(view)
    return list(reader.find(attention_modules)) if reader.find(has_attention) else []


def _stateful(layer: nn.Module) -> list[nn.Module]:
    """Returns the recurrent modules of a layer, without those of layers nested in it."""
    return [module for module in own_modules(layer)[1:] if is_recurrent(module)]
