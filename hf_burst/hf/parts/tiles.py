"""MLPs and experts that are computed some tokens at a time."""

import inspect
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ConfigError
from ...tiled import tiled
from ..cutting import language_model_of
from ..head import is_partitioned
from .base import ForwardPass, Handles, Part

_NAMES = ("MLP", "Mlp", "FeedForward", "FFN")
_INPUTS = {"x", "hidden_states", "residual"}  # of which each token has its own
_OF_EXPERTS = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)
_ROUTES = re.compile("Experts|Router|TopK")  # classes whose outputs Transformers records, or that see all tokens


class TiledMLP(Part):
    """Gives the modules of a model that treat every token by itself a forward of their own, see [`tiled`]: its MLPs,
    and the experts behind a router, by `BurstConfig.tiled_mlp`."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self.tokens = tokens
        self.modules = tokenwise_modules(language_model_of(model)) if tokens else []

    def install(self, model: PreTrainedModel) -> Handles:
        self._bind()
        return ()

    def prepare(self, run: ForwardPass) -> None:
        self._bind()  # Liger may have put its own forward there since
        if any(map(is_partitioned, self.modules)):
            raise ConfigError(
                f"BurstConfig(tiled_mlp={self.tokens}) runs MLPs again in the backward pass, where DeepSpeed ZeRO-3 "
                "has taken their weights apart. Train by FSDP2 or ZeRO-2, or set tiled_mlp=0."
            )

    def remove(self, model: PreTrainedModel) -> None:
        for module in self.modules:
            forward = vars(module).get("forward")
            if isinstance(forward, _TiledForward):
                del module.forward
                if forward.own is not None:
                    module.forward = forward.own

    def _bind(self) -> None:
        for module in self.modules:
            own = vars(module).get("forward")
            if not isinstance(own, _TiledForward):
                module.forward = _TiledForward(module, own, self.tokens)


class _TiledForward:
    """Stands for the `forward` of a module: its own one, of some tokens at a time."""

    def __init__(self, module: Any, own: Any, tokens: int) -> None:
        self.module, self.own, self.tokens = module, own, tokens

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        def forward(*inputs: Tensor) -> Tensor:
            named = dict(zip(kwargs, inputs[len(args) :], strict=True))
            out: Tensor = (
                type(self.module).forward(self.module, *inputs[: len(args)], **named)
                if self.own is None
                else self.own(*inputs[: len(args)], **named)
            )
            return out

        return tiled(self.module, forward, self.tokens, *args, *kwargs.values())


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
