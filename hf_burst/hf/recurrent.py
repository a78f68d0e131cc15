"""The functions that recurrent layers of Transformers call, over the ranks that share a sequence.

A layer with a state calls functions of its module: a convolution, a delta rule, a scan. Whoever installed a package of
kernels finds those of the package there, and plain torch otherwise. Each has a counterpart here, which calls it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..mesh import ContextGroup
from ..plan import Segments, segments_of
from ..recurrent import (
    Rule,
    causal_convolution,
    delta_rule_by_heads,
    delta_rule_by_states,
    own_heads,
    scan_by_channels,
    scan_by_states,
)
from .attention import ForwardCall

Function = Callable[..., Any]


@dataclass
class Scope:
    """What the functions of one layer know of the pass."""

    call: ForwardCall | None = None

    @property
    def group(self) -> ContextGroup:
        assert self.call is not None, "set before the layer runs"
        return self.call.group

    @property
    def by_heads(self) -> bool:
        """Whether heads are exchanged, and states do not pass."""
        assert self.call is not None, "set before the layer runs"
        return self.call.config.recurrence == "heads"

    @property
    def segments(self) -> Segments:
        assert self.call is not None, "set before the layer runs"
        return segments_of(self.call.layout.sharding, self.call.layout.documents)


def _convolution(original: Function, scope: Scope) -> Function:
    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        def convolve(laid: Tensor) -> Tensor:
            out: Tensor = original(laid, weight, bias, activation=activation)
            return out

        return causal_convolution(convolve, x, weight.shape[-1] - 1, scope.segments, scope.group)

    return causal_conv1d_fn


def _delta_rule(original: Function, scope: Scope) -> Function:
    packed = _takes(original, "cu_seqlens")

    def chunk_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        def rule(rows: Any, states: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v, decay, rate = rows
            options = {} if bounds is None else {"cu_seqlens": bounds}
            out, last = original(
                q,
                k,
                v,
                g=decay,
                beta=rate,
                initial_state=states,
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **options,
            )
            return out, last

        way = delta_rule_by_heads if scope.by_heads else delta_rule_by_states
        return way(Rule(rule, packed), (query, key, value, g, beta), scope.segments, scope.group), None

    return chunk_delta_rule


def _scan(original: Function, scope: Scope) -> Function:
    packed = _takes(original, "seq_idx")

    def mamba2_chunk_scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        heads, group = {"A": A, "D": D, "dt_bias": dt_bias}, scope.group
        if scope.by_heads:
            heads = {name: None if value is None else own_heads(value, group) for name, value in heads.items()}

        def rule(rows: Any, states: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, None]:
            hidden, steps, b, c = rows
            options: dict[str, Any] = {"chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            if bounds is not None:
                pieces = torch.arange(len(bounds) - 1, device=bounds.device, dtype=torch.int32)
                options["seq_idx"] = pieces.repeat_interleave(bounds.diff())[None]
            return original(hidden, steps, B=b, C=c, **heads, **options), None

        if scope.by_heads:
            if B.shape[2] % group.size:  # a rank has heads whose group is another's
                B, C = (tensor.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for tensor in (B, C))
            return scan_by_channels(Rule(rule, packed), (x, dt, B, C), (), scope.segments, group)
        applied = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        applied = (functional.softplus(applied) if dt_softplus else applied).clamp(*dt_limit)
        return scan_by_states(Rule(rule, packed), (x, dt, B, C), applied, A.float(), scope.segments, group)

    return mamba2_chunk_scan


def _selective_scan(original: Function, scope: Scope) -> Function:
    def mamba_selective_scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        own = {"D": D, "delta_bias": delta_bias}
        own = {name: None if value is None else own_heads(value, scope.group) for name, value in own.items()}
        decay = own_heads(A, scope.group)

        def rule(rows: Any, states: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, None]:
            hidden, steps, *gate, b, c = (row.transpose(1, 2) for row in rows)
            out = original(hidden, steps, decay, b, c, z=gate[0] if gate else None, **own, **options)
            return out.transpose(1, 2), None

        channels = [tensor.transpose(1, 2) for tensor in (x, dt, z) if tensor is not None]
        shared = [tensor.transpose(1, 2) for tensor in (B, C)]
        return scan_by_channels(Rule(rule, False), channels, shared, scope.segments, scope.group).transpose(1, 2)

    return mamba_selective_scan


def _unfused(original: Function, scope: Scope) -> Function:
    """In place of a function that does several steps at once; a layer that gets nothing does one after another."""
    return lambda *args, **kwargs: None


COUNTERPARTS: Mapping[str, Callable[[Function, Scope], Function]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolution,
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _scan,
        "mamba2_split_conv1d_scan_combined": _unfused,
        "mamba_selective_scan": _selective_scan,
        "mamba_inner_fn": _unfused,
    }
)


def functions_of(layer: nn.Module) -> tuple[str, ...]:
    """The functions with a counterpart that a layer calls, by their names."""
    forward = inspect.unwrap(type(layer).forward)
    called = getattr(forward, "__code__", None)
    return tuple(name for name in COUNTERPARTS if called and name in called.co_names and name in forward.__globals__)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that carry a state from token to token by functions with a counterpart."""
    return [module for module in model.modules() if functions_of(module)]


def rebound(layer: nn.Module, scope: Scope) -> Function:
    """The forward of a layer's class, which calls the counterparts; the class and its module stay as they are."""
    forward = type(layer).forward
    scope_of_module = inspect.unwrap(forward).__globals__
    return _copy(forward, {name: COUNTERPARTS[name](scope_of_module[name], scope) for name in functions_of(layer)})


def _copy(function: Any, replacements: Mapping[str, Function]) -> FunctionType:
    """A copy of a function, through its decorators, with other globals."""
    inner, cells, names = getattr(function, "__wrapped__", None), function.__closure__, function.__globals__
    if inner is None:
        names = {**names, **replacements}
    else:
        contents = (cell.cell_contents for cell in cells)
        cells = tuple(CellType(_copy(value, replacements) if value is inner else value) for value in contents)
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _takes(function: Any, argument: str) -> bool:
    """Whether a function, or what is chosen in its place, takes an argument. Transformers leaves out all others."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    held = {
        name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True)
    }
    return argument in held.get("applicable_params", ())
