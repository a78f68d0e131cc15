"""MLPs and experts that compute some tokens at a time."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...layers.tiled import tiled
from ...layers.tokenwise import obstacle_to_tiles
from ..context import LayerContext, current, entered
from ..forward_pass import ForwardPass
from ..models.cut_point import reader_of
from ..models.recurrent import recurrent_modules
from ..models.support import is_attention
from ..overrides import Override
from ..view import ModelView, children_of, hooks_of, inner_modules
from .base import Args, Kwargs, Part
from .expert_ranks import weights_of_experts

logger = logging.getLogger(__name__)

_CONTAINERS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
_WRAPPED = {"_checkpoint_wrapped_module", "_orig_mod"}  # names in torch's wrappers of checkpointed and compiled modules


class TiledMLP(Part):
    """Gives modules that treat every token by itself a forward in tiles, see [`tiled`]: MLPs, and the experts behind a
    router, by `Memory.tiled_mlp`. Whether a module does is found out when it runs."""

    def __init__(self) -> None:
        self.obstacles: dict[int, str] = {}  # of the latest pass
        self.logged = {""}

    def begin(self, run: ForwardPass) -> None:
        self.obstacles = {}
        # adapters, wrappers and Liger's forwards may have come since the last pass
        for module in reader_of(run.call.view).find(candidates) if run.memory.tiled_mlp else ():
            TiledForward.put(module)

    def end(self) -> None:
        for obstacle in dict.fromkeys(self.obstacles.values()):
            if obstacle not in self.logged:
                self.logged.add(obstacle)
                logger.info(obstacle)


class TiledForward(Override):
    """A module's own forward on some tokens at a time. If an obstacle prevents it, inner modules may be tiled."""

    def __init__(self, module: nn.Module, own: Any) -> None:
        super().__init__(module, own)
        self.tried: tuple[Any, str] | None = None  # a form of the module, and the obstacle found in its run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current()
        return self._tiled(context, args, kwargs) if context and context.tile else self.plain(*args, **kwargs)

    @torch.compiler.disable
    def _tiled(self, context: LayerContext, args: Args, kwargs: Kwargs) -> Any:
        inputs, count, names = (*args, *kwargs.values()), len(args), tuple(kwargs)

        def forward(*inputs: Tensor) -> Any:  # lives as long as the layer, and must not hold the inputs of the call
            with entered(None):  # inner modules take the whole tile
                return self.plain(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

        if not _have_tiles(inputs, context.tile):
            return self.plain(*args, **kwargs)
        if id(self) not in context.obstacles:  # found once, so that a rerun of the layer does the same
            context.obstacles[id(self)] = self._obstacle(forward, inputs, context.tile)
        if context.obstacles[id(self)]:
            return self.plain(*args, **kwargs)
        return tiled(self.module, forward, context.tile, *inputs)

    def _obstacle(self, forward: Callable[..., Any], inputs: tuple[Tensor, ...], tile: int) -> str:
        """Returns why the module is not computed in tiles, or an empty string."""
        found = _visible_obstacle(self.module)
        if not found:
            # what the result depends on, beside weights
            inner = inner_modules(self.module)
            forms = [(type(each), each.training, type(vars(each).get("forward"))) for each in inner]
            form = torch.is_inference_mode_enabled(), forms
            if self.tried is None or self.tried[0] != form:
                self.tried = form, obstacle_to_tiles(self.module, forward, inputs, tile)
            found = self.tried[1]
        return found and f"{type(self.module).__name__} is not computed in tiles as a whole: {found}."


def candidates(view: ModelView) -> list[nn.Module]:
    """Returns the modules inside a model's layers that multiply by several matrices and contain no attention or
    recurrence. One may be inside another."""
    found, recurrent = list[nn.Module](), set(map(id, view.find(recurrent_modules)))
    for layer in view.layers:
        for child in children_of(layer).values():
            _collect(child, recurrent, found)
    return list(dict.fromkeys(found))


def _collect(module: nn.Module, recurrent: set[int], found: list[nn.Module]) -> tuple[int, bool]:
    """Adds a module and its inner ones to `found`. Returns its number of matrices, and whether it mixes tokens."""
    begin, matrices, mixes = len(found), _own_matrices(module), False
    children = children_of(module)
    if "base_layer" in children:  # of a peft adapter, whose own matrices do not count
        children = {"base_layer": children["base_layer"]}
    for child in children.values():
        more, mixing = _collect(child, recurrent, found)
        matrices, mixes = matrices + more, mixes or mixing
    if (is_attention(type(module)) and not mixes) or id(module) in recurrent:
        del found[begin:]  # attention and recurrence projections
        return matrices, True
    passes = isinstance(module, GradientCheckpointingLayer | _CONTAINERS) or not _WRAPPED.isdisjoint(children)
    if matrices > 1 and not mixes and not passes:
        found.append(module)
    return matrices, mixes


def _own_matrices(module: nn.Module) -> int:
    weights = sum(weight is not None and weight.dim() > 1 for weight in module._parameters.values())
    return weights or int(any(value is not None and value.dim() > 1 for value in module._buffers.values()))


def _have_tiles(inputs: tuple[Any, ...], tokens: int) -> bool:
    """Returns whether all arguments are tensors over the same tokens, and more of them than a tile has."""
    if not inputs or not all(type(value) is Tensor and value.dim() > 1 for value in inputs):
        return False
    rows, n = inputs[0].shape[:-2].numel(), inputs[0].shape[-2]
    if not rows or n <= max(1, tokens // rows) or torch._C._are_functorch_transforms_active():
        return False
    same = len({value.shape[:-1] for value in inputs}) == 1
    return same and any(value.is_floating_point() for value in inputs)


def _visible_obstacle(module: nn.Module) -> str:
    """Returns what prevents tiles, whatever the module computes, or an empty string."""
    if nn.modules.module._has_any_global_hook():
        return "hooks on all modules are set"
    if any(weights_of_experts(module)):  # a tile would wait for tiles of other ranks, which may have fewer
        return "its experts lie on several ranks"
    for inner in inner_modules(module):
        if len({name for layer in getattr(inner, "adapter_layer_names", ()) for name in getattr(inner, layer, {})}) > 1:
            return "it has several adapters, of which another may be set before the backward pass"
        if hooks_of(inner) and inner is not module:  # such as hooks of an FSDP2 unit, which see all tokens at once
            return f"a {type(inner).__name__} in it has hooks"
    return ""
