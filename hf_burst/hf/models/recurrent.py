"""Versions over ranks of the functions that recurrent layers of Transformers call.

A recurrent layer calls functions of its Python module: a convolution, a delta rule, a scan. They come from a kernel
package if one is installed, else from plain torch. Each has a counterpart here, which calls it.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UnsupportedModelError
from ...plan.recurrence import Way
from ...recurrent import (
    LastStates,
    ReplayBuffer,
    Rule,
    Shards,
    causal_convolution,
    compile_ahead,
    delta_rule_by_heads,
    delta_rule_by_states,
    delta_rule_in_two_passes,
    fla_compared,
    fla_convolution,
    fla_kernels,
    in_two_passes,
    own_heads,
    scan_by_channels,
    scan_by_states,
    unit_norm,
)
from ..context import current
from ..view import ModelView

Function = Callable[..., Any]


def _pass() -> tuple[Way, Shards, LastStates | None]:
    """Returns the schedule of the current sharded pass, its shards, and storage for the states at the end of prompts;
    `None` if nothing is generated."""
    context = current()
    assert context is not None, "asked by the forward of the module"
    assert context.sharded_pass is not None, "asked by the forward of the module"
    run = context.sharded_pass
    shards = Shards(run.segments, run.group, context.replay or ReplayBuffer())
    if context.cached is None:
        return run.way, shards, None
    return run.way, shards, LastStates.of(run.segments, run.group, [stop for _, stop in run.layout.spans])


def _convolution(original: Function) -> Function:
    plain = _held(original).get("is_new_implementation") is False  # no kernel package replaces it

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        by_fla = plain and activation in (None, "silu", "swish") and fla_compared(x.device)

        def convolve(laid: Tensor) -> Any:
            if by_fla and laid.dtype != torch.float64:  # needs no transpose, and fuses the activation
                return fla_convolution(laid, weight, bias, activation)
            return original(laid, weight, bias, activation=activation)

        return causal_convolution(convolve, x, weight.shape[-1] - 1, _pass()[1])

    return causal_conv1d_fn


def _delta_rule(original: Function) -> Function:
    packed, by_fla = _takes(original, "cu_seqlens"), _takes(original, "cp_context")

    def chunk_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        def over_rows(rows: Any, states: Tensor | None, bounds: Tensor | None, ends: bool) -> Any:
            q, k, v, decay, rate = rows
            options = {} if bounds is None else {"cu_seqlens": bounds}
            if by_fla and states is None and fla_compared(q.device):
                settings = {"output_final_state": ends, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
                compile_ahead(original, *rows, packed=bounds is not None, **settings)
            return original(
                q,
                k,
                v,
                g=decay,
                beta=rate,
                initial_state=states,
                output_final_state=ends,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **options,
            )

        rule = Rule(over_rows, packed)
        inputs = (query, key, value, g, beta)
        way, shards, last = _pass()
        if last is not None:
            out = delta_rule_by_states(rule, inputs, shards, last)
            like = value.new_zeros(value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float32)
            return out, last.on_all_ranks(like)
        if way == "heads":
            return delta_rule_by_heads(rule, inputs, shards), None
        kernels = fla_kernels(query.device, key.shape[-1]) if by_fla and g.ndim == 3 else None  # KDA's `g` has 4 dims
        if kernels is None:
            return delta_rule_by_states(rule, inputs, shards), None
        if use_qk_l2norm_in_kernel:
            inputs = (unit_norm(query), unit_norm(key), value, g, beta)
            use_qk_l2norm_in_kernel = False
        if shards.segments.slots and fla_compared(query.device):  # reference kernels of tests need not be compiled
            compile_ahead(in_two_passes, *inputs)
        return delta_rule_in_two_passes(rule, kernels, inputs, shards), None

    return chunk_delta_rule


def _scan(original: Function) -> Function:
    packed = _takes(original, "seq_idx")

    def mamba2_chunk_scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, **options: Any
    ) -> Any:
        if any(options.get(name) is not None for name in ("z", "initial_states")):
            raise UnsupportedModelError(
                "A Mamba2 layer gave a gate or initial states to its scan, which is not known over ranks. Train it on "
                "sequences that one GPU holds."
            )
        way, shards, last = _pass()
        group, limit = shards.group, options.get("dt_limit", (0.0, float("inf")))
        steps: dict[str, Any] = {"dt_softplus": options.get("dt_softplus", False), "dt_limit": limit}
        heads = {"A": a, "D": options.get("D"), "dt_bias": options.get("dt_bias")}
        by_heads = way == "heads" and last is None
        if by_heads:
            heads = {name: None if value is None else own_heads(value, group) for name, value in heads.items()}

        def rule(rows: Any, states: Tensor | None, bounds: Tensor | None, ends: bool) -> tuple[Tensor, None]:
            hidden, rates, keys, queries = rows
            places = {} if bounds is None else {"seq_idx": _places(bounds, hidden.shape[1])}
            out = original(hidden, rates, B=keys, C=queries, chunk_size=chunk_size, **heads, **steps, **places)
            return out, None

        if by_heads:
            return scan_by_channels(Rule(rule, packed), (x, dt, b, c), (), shards)
        applied = dt.float() if heads["dt_bias"] is None else dt.float() + heads["dt_bias"].float()
        applied = (functional.softplus(applied) if steps["dt_softplus"] else applied).clamp(*limit)
        out = scan_by_states(Rule(rule, packed), (x, dt, b, c), applied, a.float(), shards, last)
        if last is None:
            return out
        return out, last.on_all_ranks(a.float().new_zeros(x.shape[2], x.shape[3], b.shape[3]))

    return mamba2_chunk_scan


def _places(bounds: Tensor, tokens: int) -> Tensor:
    """Returns the index of its piece for each token of a row: `(1, tokens)`."""
    numbers = torch.arange(len(bounds) - 1, device=bounds.device, dtype=torch.int32)
    return numbers.repeat_interleave(bounds.diff(), output_size=tokens)[None]  # output_size avoids a GPU sync


def _selective_scan(original: Function) -> Function:
    def mamba_selective_scan(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, z: Tensor | None = None, **options: Any
    ) -> Tensor:
        _, shards, _ = _pass()
        own = {name: options.pop(name, None) for name in ("D", "delta_bias")}
        own = {name: None if value is None else own_heads(value, shards.group) for name, value in own.items()}
        decay = own_heads(a, shards.group)

        def rule(rows: Any, states: Tensor | None, bounds: Tensor | None, ends: bool) -> tuple[Tensor, None]:
            hidden, steps, *gate, keys, queries = (row.transpose(1, 2) for row in rows)
            out = original(hidden, steps, decay, keys, queries, z=gate[0] if gate else None, **own, **options)
            return out.transpose(1, 2), None

        channels = [tensor.transpose(1, 2) for tensor in (x, dt, z) if tensor is not None]
        shared = [tensor.transpose(1, 2) for tensor in (b, c)]
        return scan_by_channels(Rule(rule, False), channels, shared, shards).transpose(1, 2)

    return mamba_selective_scan


def _unfused(original: Function) -> Function:
    """Returns a replacement for a fused function. It returns `None`, so the layer runs the steps one by one."""
    return lambda *args, **kwargs: None


COUNTERPARTS: Mapping[str, Callable[[Function], Function]] = MappingProxyType(
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


@cache
def functions_of(forward: Any) -> tuple[str, ...]:
    """Returns the names of the functions with a counterpart that the forward of a class calls."""
    forward = inspect.unwrap(forward)
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    return tuple(name for name in COUNTERPARTS if name in called and name in forward.__globals__)


def is_recurrent(module: nn.Module) -> bool:
    """Returns whether a module carries a state from token to token by known functions."""
    return bool(functions_of(type(module).forward))


def recurrent_modules(view: ModelView) -> list[nn.Module]:
    """Returns the modules that carry a state from token to token by known functions."""
    return [module for module in view.modules if is_recurrent(module)]


def over_ranks(kind: Any) -> Function:
    """Returns a copy of a class's forward that calls the counterparts; the class and its module stay unchanged."""
    functions = inspect.unwrap(kind.forward).__globals__
    counterparts = {name: COUNTERPARTS[name](functions[name]) for name in functions_of(kind.forward)}

    def rebind(inner: FunctionType) -> FunctionType:
        return _copy(inner, {**inner.__globals__, **counterparts}, inner.__closure__)

    return in_place_of_innermost(kind.forward, rebind)


def in_place_of_innermost(function: Any, make: Callable[[FunctionType], Function]) -> Function:
    """Copies a decorated function, with the innermost function replaced by `make(innermost)`."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return make(function)
    contents = [cell.cell_contents for cell in function.__closure__]
    cells = [CellType(in_place_of_innermost(value, make) if value is inner else value) for value in contents]
    return _copy(function, function.__globals__, tuple(cells))


def _copy(function: FunctionType, names: dict[str, Any], cells: tuple[CellType, ...] | None) -> FunctionType:
    """Copies a function with these globals and this closure."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _takes(function: Any, argument: str) -> bool:
    """Returns whether a function, or its installed kernel, takes an argument. Transformers drops all others."""
    return argument in _held(function).get("applicable_params", ())


def _held(function: Any) -> Mapping[str, Any]:
    """Returns the closure variables of Transformers' wrapper around a function."""
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
