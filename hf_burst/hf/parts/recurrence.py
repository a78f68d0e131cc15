"""Layers that carry a state from token to token: their functions compute over the ranks, for this model alone."""

import inspect
import logging
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError, UnsupportedModelError
from ...recurrent import Received, fla_kernels
from ..attention import CALL_KEY, ForwardCall
from ..models.bypassed import check_recurrent_sources, function_name
from ..models.recurrent import RUN_KEY, Function, Run, Scope, functions_of, in_place_of_innermost
from ..models.rewrites import over_ranks, recurrent_modules
from .base import ForwardPass, Handles, Part

logger = logging.getLogger(__name__)

# whose kernels were compared over ranks
_ON_GPUS = {
    *("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
    *("mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"),
}
_FUNCTION = "_gradient_checkpointing_func"  # of a layer that is checkpointed
_CHECKPOINTS_CALLS = "__call__" in vars(GradientCheckpointingLayer)
_CACHES = ("cache_params", "past_key_values")
_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # what wrappers call the one module inside
_CHECKPOINT = (
    "Checkpoint whole layers: model.gradient_checkpointing_enable(), or gradient_checkpointing=True among the training "
    "arguments."
)
_REPLACED = (
    "The forward of a {} was replaced by {}, so its state would not pass from rank to rank. Put its own back. If the "
    "model is patched by then, call hf_burst.unpatch_model(model), and patch it anew."
)


class Recurrence(Part):
    """Gives recurrent modules a `forward` of their own, and the layers around them one that tells them of the pass,
    inside of what is checkpointed: a backward pass that runs a layer again tells them, too."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules: list[Any] = []
        self.layers: list[Any] = []
        self.unknown: list[str] = []
        self.warned = False

    def look(self, model: PreTrainedModel) -> Handles:
        check_recurrent_sources(model)
        self.modules = recurrent_modules(model)
        self.layers = _around(self.modules, model) if self.modules else []
        kinds = set(map(type, self.modules))
        self.unknown = sorted(kind.__name__ for kind in kinds if not set(functions_of(kind) or "?") <= _ON_GPUS)
        self._bind_all()
        return ()

    def prepare(self, run: ForwardPass) -> None:
        self._bind_all()
        if self.modules:  # by which delta rules send other messages
            run.facts["kernels of flash-linear-attention"] = fla_kernels(run.device, 1) is not None
        if self.modules and run.facts.get("activation checkpointing"):
            self._see_to_wrappers(run.model)
            for layer in self.layers if _CHECKPOINTS_CALLS else ():
                holder, name = _holder(layer)
                if name in vars(holder) and not isinstance(vars(holder)[name], _TellingCheckpoint):
                    setattr(holder, name, _TellingCheckpoint(vars(holder)[name], layer))

    def begin(self, run: ForwardPass) -> None:
        for layer in self.layers:
            layer.forward.scope.run = _inside(None, run.call)
        for module in self.modules:
            module.forward.scope.under_way = True
        if self.unknown and run.device.type == "cuda" and run.group.size > 1 and not self.warned:
            self.warned = True
            logger.warning(
                "Over ranks, %s was compared with one process on CPUs only, not by its kernels for GPUs. Compare the "
                "loss of a batch of yours by hf-burst check --batch.",
                ", ".join(self.unknown),
            )

    def end(self) -> None:
        for module in (*self.modules, *self.layers):
            scope = getattr(vars(module).get("forward"), "scope", None)
            if scope is not None:
                scope.run, scope.under_way = None, False

    def remove(self, model: PreTrainedModel) -> None:
        for module in (*self.modules, *self.layers):
            if hasattr(vars(module).get("forward"), "scope"):
                del module.forward
        for layer in self.layers:
            holder, name = _holder(layer)
            if isinstance(vars(holder).get(name), _TellingCheckpoint):
                setattr(holder, name, vars(holder)[name].function)
        for module in model.modules() if self.modules else ():
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is _tell_wrapped:
                    del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]

    def _bind_all(self) -> None:
        """Gives all of them their forward, those of a model that was saved whole too; raises if another has come."""
        for module in (*self.modules, *self.layers):
            own = vars(module).get("forward")
            if own is None or own == MethodType(type(module).forward, module):
                _bind(module)
            elif getattr(own, "replaces", type(module).forward) is not type(module).forward:
                raise ConfigError(_REPLACED.format(type(module).__name__, function_name(type(module).forward)))
            elif not hasattr(own, "scope"):
                raise ConfigError(_REPLACED.format(type(module).__name__, function_name(own)))

    def _see_to_wrappers(self, model: nn.Module) -> None:
        """Lets torch's CheckpointWrapper, which accelerate puts around layers for FSDP, tell them of the pass."""
        bound = {id(module) for module in (*self.modules, *self.layers)}
        for wrapper in model.modules():
            if not isinstance(wrapper, ActivationWrapper) or bound.isdisjoint(map(id, wrapper.modules())):
                continue
            if id(_innermost(wrapper)) not in bound:
                raise ConfigError(
                    f"A {type(wrapper).__name__} is around a {type(_innermost(wrapper)).__name__} that holds recurrent "
                    f"layers, which would not know how the sequence is sharded when they run again. {_CHECKPOINT}"
                )
            if _tell_wrapped not in wrapper._forward_pre_hooks.values():
                wrapper.register_forward_pre_hook(_tell_wrapped, with_kwargs=True)


def _around(modules: list[Any], model: nn.Module) -> list[Any]:
    """The layers that hold recurrent modules, of each the innermost one."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    around = {inner: layer for layer in layers for inner in recurrent_modules(layer)}
    for module in modules:
        if around.get(module, module) is module:
            raise UnsupportedModelError(
                f"A {type(module).__name__} is in no layer that Transformers can checkpoint, by which it would learn "
                "how the sequence is sharded."
            )
    return list(dict.fromkeys(around.values()))


def _innermost(module: nn.Module) -> nn.Module:
    """What wrappers are around."""
    inside = next((module._modules[name] for name in _WRAPPED if module._modules.get(name) is not None), None)
    return module if inside is None else _innermost(inside)


def _tell_wrapped(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of a checkpoint around a layer or a recurrent module, which are told again with it."""
    outer: Run | None = kwargs.get(RUN_KEY) or _scope_of(_innermost(wrapper)).run
    if outer is None:
        return None
    return args, {**kwargs, RUN_KEY: _inside(outer, kwargs.get(CALL_KEY) or outer.call)}


class _TellingCheckpoint:
    """The function that checkpoints a layer, where Transformers (before 5.23) calls it around `__call__`."""

    def __init__(self, function: Function, layer: nn.Module) -> None:
        self.function, self.layer = function, layer

    def __call__(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        outer: Run | None = run.keywords.get(RUN_KEY)
        if outer is not None:
            outer.received.start()
        known = outer or _scope_of(self.layer).run
        call = run.keywords.get(CALL_KEY) or (None if known is None else known.call)
        if call is not None:
            run = partial(run, **{RUN_KEY: _inside(outer, call)})
        return self.function(run, *args, **kwargs)


def _holder(layer: nn.Module) -> tuple[Any, str]:
    """What has the function that checkpoints a layer, and by which name: the layer, or what wraps the function."""
    function = vars(layer).get(_FUNCTION)
    return (function, "function") if hasattr(function, "checkpoints") else (layer, _FUNCTION)


def _inside(outer: Run | None, call: ForwardCall) -> Run:
    """The run of a layer, or of a checkpoint, within another one. What it keeps follows what is kept of attention."""
    around = None if outer is None else outer.received
    return Run(call, Received(around, call.settings.attention_keep > 0))


def _bind(module: Any) -> None:
    """Gives a module the forward of a sharded pass, which in others is as before."""
    make = _telling if isinstance(module, GradientCheckpointingLayer) else _sharded
    module.forward = MethodType(make(module), module)


def _sharded(module: nn.Module) -> Function:
    """The forward of a recurrent module."""
    scope, plain = Scope(), type(module).forward
    sharded: Function = torch.compiler.disable(over_ranks(module, scope))  # sends messages; what is around it compiles
    masks = "attention_mask" in inspect.signature(plain).parameters

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(CALL_KEY, None)
        if RUN_KEY in kwargs:  # of a checkpoint around this module
            scope.run = kwargs.pop(RUN_KEY)
            scope.received.start()
        if scope.run is None:
            _refuse_blind_run(self, scope.under_way)
            return plain(self, *args, **kwargs)
        if masks:
            kwargs["attention_mask"] = scope.call.real
        kwargs |= {name: None for name in _CACHES if name in kwargs}  # it would hold the states of a shard
        try:
            return sharded(self, *args, **kwargs)
        finally:
            scope.run = None

    forward.scope, forward.replaces = scope, plain  # type: ignore[attr-defined]
    return forward


def _refuse_blind_run(module: nn.Module, under_way: bool) -> None:
    """Raises in a sharded pass, and in a backward pass, where a checkpoint runs the module again: it was not told."""
    if under_way:
        raise ConfigError(
            f"A {type(module).__name__} ran outside of its layer, or a second time in it, so that no state would pass "
            "from rank to rank. Whatever replaced the forward of its model has to call the layers themselves."
        )
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"A {type(module).__name__} runs again in the backward pass, by a checkpoint that does not tell it how the "
            f"sequence is sharded. {_CHECKPOINT}"
        )


def _scope_of(module: nn.Module) -> Scope:
    """What a recurrent module knows of the pass; raises if it is none of those that were patched."""
    scope: Scope | None = getattr(vars(module).get("forward"), "scope", None)
    if scope is None:
        raise ConfigError(
            f"A {type(module).__name__} was put into the model after it was patched, so its state would not pass from "
            "rank to rank. Unpatch the model, then patch it anew."
        )
    return scope


def _telling(layer: nn.Module) -> Function:
    """The forward of a layer around recurrent modules. Some models do not hand on what they are given by name: what
    their layers are not told is told here."""
    scope = Scope()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around: Run | None = kwargs.pop(RUN_KEY, None)
        if around is not None:  # of a checkpoint around this layer
            around.received.start()
        known = around or scope.run
        call = kwargs.pop(CALL_KEY, known.call if known is not None else None)
        kwargs[RUN_KEY] = None if call is None else _inside(around, call)
        kind: Any = type(self)  # FSDP2 changes it
        return _telling_inside(kind.forward)(self, *args, **kwargs)

    forward.scope = scope  # type: ignore[attr-defined]
    return forward


@torch.compiler.disable
def _tell(layer: nn.Module, run: Run) -> None:
    """Tells the recurrent modules of a layer that it begins to run."""
    run.received.start()
    for module in recurrent_modules(layer):
        _scope_of(module).run = run


@torch.compiler.disable
def _forget(layer: nn.Module) -> None:
    """Leaves nothing of the pass with the recurrent modules of a layer."""
    for module in recurrent_modules(layer):
        _scope_of(module).run = None


@torch.compiler.disable
def _check_told(layer: nn.Module) -> None:
    """Raises if a recurrent module of a layer that has run did not take up what it was told."""
    for module in recurrent_modules(layer):
        if _scope_of(module).run is not None:
            raise ConfigError(
                f"{type(layer).__name__} did not call the forward of its {type(module).__name__}, so that no state "
                "passed from rank to rank. Was it replaced after the model was patched? Unpatch the model, then patch "
                "it anew."
            )


@cache
def _telling_inside(function: Any) -> Any:
    """The forward of a class, which tells the recurrent modules of a layer of the pass, or of none."""

    def make(inner: FunctionType) -> Function:
        named = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(inner).parameters.values()
        )

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run: Run | None = kwargs.pop(RUN_KEY)
            if run is None:
                return inner(self, *args, **kwargs)
            _tell(self, run)
            try:
                out = inner(self, *args, **kwargs, **({CALL_KEY: run.call} if named else {}))
                _check_told(self)
            finally:
                _forget(self)  # a recomputation may end before its last module
            return out

        return forward

    return in_place_of_innermost(function, make)
