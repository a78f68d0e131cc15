"""Recurrent layers that compute their states inside of their own `forward`, where no function can be rebound.

Each has a counterpart here, for the source that it was written for. Another source is refused: nobody compared it.
"""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UnsupportedModelError
from ...recurrent import (
    causal_convolution,
    lightning_by_heads,
    lightning_by_states,
    recurrence_by_channels,
    recurrence_by_states,
)
from .recurrent import Function, Scope, functions_of, rebound


class _View:
    """A module, some parts of which are others; what is set on it does not reach the module."""

    def __init__(self, module: nn.Module, **parts: Any) -> None:
        self.__dict__.update(parts, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _lightning(kind: Any, scope: Scope) -> Function:
    """MiniMax: the states of all heads, which forget at fixed rates."""

    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        mixed = self.act_fn(self.qkv_proj(hidden_states))
        if scope.call.real is not None:
            mixed = mixed * scope.call.real[..., None]
        inputs = mixed.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim)).split(self.head_dim, dim=-1)
        settings = self.slope_rate.flatten(), self.block_size, scope.segments, scope.group
        if scope.by_heads:
            out = lightning_by_heads(inputs, *settings)
        else:
            out = lightning_by_states(inputs, *settings, scope.received)
        out = self.output_gate(hidden_states).sigmoid() * self.norm(out.flatten(2))
        return self.out_proj(out), None

    return forward


def _griffin(kind: Any, scope: Scope) -> Function:
    """RecurrentGemma: a convolution, and a recurrence of single numbers. In Transformers they read padding, too."""

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any) -> tuple[Tensor, None]:
        inputs = recurrent_gate * ~reset, hidden_states, scope.segments_of_rows, scope.group
        if scope.by_heads:
            return recurrence_by_channels(*inputs), None
        return recurrence_by_states(*inputs, scope.received), None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def convolve(x: Tensor) -> Tensor:
            reach = self.conv1d_width - 1
            return causal_convolution(
                lambda laid: self.conv_1d(laid)[..., : laid.shape[-1]],
                x,
                reach,
                scope.segments_of_rows,
                scope.group,
                scope.received,
            )

        def unit(activations: Tensor, position_ids: Tensor) -> Tensor:
            out: Tensor = type(self.rg_lru).forward(_View(self.rg_lru, _rnn_scan=scan), activations, position_ids)
            return out

        return kind.forward(_View(self, conv_1d=convolve, rg_lru=unit), *args, **{**kwargs, "use_cache": False})

    return forward


def _compressed(kind: Any, scope: Scope) -> Function:
    """Zaya: two convolutions of queries and keys, one after another, and values of the token before."""

    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        if scope.call.real is not None:
            hidden_states = hidden_states * scope.call.real[..., None].to(hidden_states.dtype)
        queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
        reach, sizes = self.conv_kernel_size, [queries.shape[-1] + keys.shape[-1], hidden_states.shape[-1]]

        def convolve(laid: Tensor) -> Tensor:
            mixed, tokens = laid.split(sizes, dim=1)
            mixed = self.conv_qk_grouped(self.conv_qk_depthwise(functional.pad(mixed, (reach, 0))))
            return torch.cat([mixed, functional.pad(tokens, (1, -1))], dim=1)

        laid = torch.cat([queries, keys, hidden_states], dim=-1).transpose(1, 2)
        laid = causal_convolution(convolve, laid, max(1, reach), scope.segments, scope.group, scope.received)
        mixed, before = laid.transpose(1, 2).split(sizes, dim=-1)
        heads, groups = (*hidden_states.shape[:-1], -1, self.head_dim), self.num_key_value_groups
        query = (queries.view(heads) + keys.view(heads).repeat_interleave(groups, dim=2)) * 0.5
        key = query.unflatten(2, (-1, groups)).mean(dim=3)
        query = mixed[..., : queries.shape[-1]].reshape(heads) + query
        key = mixed[..., queries.shape[-1] :].reshape(heads) + key
        value = torch.cat([self.v_proj_current(hidden_states), self.v_proj_delayed(before)], dim=-1)
        return query, key, value.view(heads)

    return forward


@dataclass(frozen=True)
class Door:
    """The counterpart of a class.

    Args:
        make (`Callable`): The forward over ranks, of the class and the scope of a module.
        source (`tuple[str, ...]`): The methods that it was written for, by their names in the module.
        known (`frozenset[str]`): Their fingerprints in the releases of Transformers that have the class.
    """

    make: Callable[[Any, Scope], Function]
    source: tuple[str, ...]
    known: frozenset[str]


DOORS: Mapping[str, Door] = MappingProxyType(
    {
        "MiniMaxLightningAttention": Door(
            _lightning, ("MiniMaxLightningAttention.forward",), frozenset({"7c3b321cd59c", "5b9c0fa05d10"})
        ),
        "RecurrentGemmaRecurrentBlock": Door(
            _griffin,
            (
                "RecurrentGemmaRecurrentBlock.forward",
                "RecurrentGemmaRglru.forward",
                "RecurrentGemmaRglru._rnn_scan",
            ),
            frozenset({"59dc59fc6c32"}),
        ),
        "ZayaCCAProjection": Door(
            _compressed, ("ZayaCCAProjection.forward",), frozenset({"45e9d9ee8432", "8ffa64313b6b"})
        ),
    }
)


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that carry a state from token to token in a way that is known.

    Raises:
        UnsupportedModelError: If the source of one is not the one that its counterpart was written for.
    """
    return [module for module in model.modules() if _is_recurrent(module)]


def over_ranks(module: nn.Module, scope: Scope) -> Function:
    """The forward of a module over ranks; its class and source file stay as they are."""
    kind: Any = type(module)
    door = _door_of(kind.forward)
    return rebound(module, scope) if door is None else door.make(kind, scope)


def _is_recurrent(module: nn.Module) -> bool:
    kind: Any = type(module)
    return bool(functions_of(kind)) or _door_of(kind.forward) is not None


@cache
def _door_of(forward: Any) -> Door | None:
    """The counterpart of the class that a forward is of; that of one may be replaced at any time."""
    forward = inspect.unwrap(forward)
    name, _, method = getattr(forward, "__qualname__", "").partition(".")
    if method != "forward" or name not in DOORS or not forward.__module__.startswith("transformers.models."):
        return None
    door = DOORS[name]
    if source_fingerprint(forward.__module__, door.source) not in door.known:
        raise UnsupportedModelError(
            f"{name} of transformers {transformers.__version__} computes its states by another source than those that "
            "hf_burst knows, of transformers 5.17 to 5.23. Install one of these, or a newer hf_burst."
        )
    return door


def source_fingerprint(module: str, methods: tuple[str, ...]) -> str:
    """A hash of the source of methods, whatever their comments and line breaks."""
    texts = []
    for path in methods:
        function: Any = sys.modules[module]
        for name in path.split("."):
            function = getattr(function, name)
        texts.append(ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))))
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=6).hexdigest()
