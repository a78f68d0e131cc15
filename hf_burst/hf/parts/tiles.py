"""MLPs and experts that are computed some tokens at a time."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError
from ...tiled import tiled
from ..cutting import language_model_of
from ..head import is_partitioned
from .base import ForwardPass, Part, StandIn
from .replicas import has_fsdp1

_NAMES = ("MLP", "Mlp", "FeedForward", "FFN")
_INPUTS = {"x", "hidden_states", "residual"}  # of which each token has its own
_OF_EXPERTS = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)
_ROUTES = re.compile("Experts|Router|TopK")  # classes whose outputs Transformers records, or that see all tokens


@dataclass
class Tile:
    """How many tokens the modules of a model take at a time by now; 0 for all."""

    tokens: int = 0

    def within(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's run that a checkpoint repeats, when another pass may have begun: in the tiles of the first run."""
        tokens, function = self.tokens, run.func if isinstance(run, partial) else run

        def again(*args: Any, **kwargs: Any) -> Any:
            before, self.tokens = self.tokens, tokens
            try:
                return function(*args, **kwargs)
            finally:
                self.tokens = before

        return partial(again, *run.args, **run.keywords) if isinstance(run, partial) else again


def takes_weights_apart(model: nn.Module) -> bool:
    """Whether a wrapper does so (DeepSpeed ZeRO-3, FSDP1), so that a backward pass cannot run its modules again."""
    return is_partitioned(model) or has_fsdp1(model)


class TiledMLP(Part):
    """Gives the modules of a model that treat every token by itself a forward of their own, see [`tiled`]: its MLPs,
    and the experts behind a router, by `BurstConfig.tiled_mlp`."""

    def __init__(self, model: PreTrainedModel, tile: "Tile") -> None:
        self.modules = tokenwise_modules(language_model_of(model))
        self.tile = tile

    def prepare(self, run: ForwardPass) -> None:
        if run.config.tiled_mlp and takes_weights_apart(run.model):
            raise ConfigError(
                f"BurstConfig(tiled_mlp={run.config.tiled_mlp}) runs MLPs again in the backward pass, where DeepSpeed "
                "ZeRO-3 or FSDP1 has taken their weights apart. Train by FSDP2 or ZeRO-2, or set tiled_mlp=0."
            )

    def begin(self, run: ForwardPass) -> None:
        self.tile.tokens = run.settings.tiled_mlp
        for module in self.modules if self.tile.tokens else ():
            own = vars(module).get("forward")
            if not isinstance(own, _TiledForward):  # the first time, or Liger has put its own there since
                module.forward = _TiledForward(module, own, self.tile)

    def remove(self, model: PreTrainedModel) -> None:
        for module in self.modules:
            forward = vars(module).get("forward")
            if isinstance(forward, _TiledForward):
                del module.forward
                if forward.own is not None:
                    module.forward = forward.own


class _TiledForward(StandIn):
    """A module's own forward, of some tokens at a time."""

    def __init__(self, module: nn.Module, own: Any, tile: "Tile") -> None:
        super().__init__(module)
        self.own, self.tile = own, tile

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        module: Any = self.module
        count, names = len(args), tuple(kwargs)  # the function lives as long as the layer, and its inputs must not

        def forward(*inputs: Tensor) -> Tensor:
            named = dict(zip(names, inputs[count:], strict=True))
            out: Tensor = (
                type(module).forward(module, *inputs[:count], **named)
                if self.own is None
                else self.own(*inputs[:count], **named)
            )
            return out

        inputs = *args, *kwargs.values()
        return tiled(module, forward, self.tile.tokens, *inputs) if self.tile.tokens else forward(*inputs)

    def _given(self) -> tuple[Any, ...]:
        return self.module, self.own, self.tile


def tokenwise_modules(model: nn.Module) -> list[Any]:
    """The modules inside the layers of a model that treat every token by itself, by the names of their classes and
    inputs: MLPs, and experts that are told which tokens are theirs."""
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return list(dict.fromkeys(chain.from_iterable(map(_tokenwise_inside, layers))))


def _tokenwise_inside(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_tokenwise(child):
            yield child
        else:
            yield from _tokenwise_inside(child)


def _is_tokenwise(module: nn.Module) -> bool:
    kind: Any = type(module)
    inputs = list(inspect.signature(kind.forward).parameters)[1:]
    if kind.__name__.endswith("Experts"):
        return inputs in _OF_EXPERTS
    inside = any(_ROUTES.search(type(inner).__name__) for inner in module.modules())
    return kind.__name__.endswith(_NAMES) and _INPUTS.issuperset(inputs) and not inside
