"""The steps of a gated delta rule, by the kernels that flash-linear-attention's own function calls in turn."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import from_host, tuning
from .two_passes import DeltaKernels, Inputs, Opaque, Passing

_COMPARED = "0.6."  # the versions compared, because the kernels are not a stable interface
_OTHERS = ("tilelang", "flash_qla")  # packages of kernels that fla calls if they are there
_CHUNK = 64  # tokens in one matrix product
_LARGEST = 256  # most key dimensions of a head


def fla_kernels(device: torch.device, keys: int) -> DeltaKernels | None:
    """Returns the kernels for this key size, or `None` if they cannot run or this version was not compared."""
    return _FlaKernels() if keys <= _LARGEST and fla_compared(device) else None


def fla_compared(device: torch.device) -> bool:
    """Whether flash-linear-attention runs on the device, in a version that was compared."""
    if device.type != "cuda" or torch.version.hip is not None or not fla_installed():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def fla_installed() -> bool:
    """Whether flash-linear-attention is installed, in a version that was compared."""
    try:
        return version("fla-core").startswith(_COMPARED)
    except PackageNotFoundError:
        return False


def unit_norm(tensor: Tensor) -> Tensor:
    """Normalizes vectors along the last dimension, as fla's own function does with queries and keys."""
    from fla.modules.norm.l2norm import l2norm

    compile_ahead(l2norm, tensor)
    return l2norm(tensor)


def fla_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Computes each channel's causal convolution, as `causal_conv1d_fn` does for x of shape `(batch, channels, n)`.
    In memory the channels of a token are contiguous, in the input and the output."""
    from fla.modules.causal_conv1d import causal_conv1d

    rows = x.transpose(1, 2)
    compile_ahead(causal_conv1d, rows, weight, bias, activation=activation)
    return causal_conv1d(rows, weight, bias, activation=activation)[0].transpose(1, 2)


def fla_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """Computes `x / sqrt(mean(x^2) + eps) * weight * activation(gate)` for each row, in fp32 and rounded once. Triton
    tunes the kernel once for every further 65,536 rows, and caches the compiled ones.

    Args:
        x (`torch.Tensor` of shape `(..., D)`): The input; the result has its dtype.
        gate (`torch.Tensor`): The gate, of the same shape.
        weight (`torch.Tensor` of shape `(D,)`): The norm's weight.
        eps (`float`): Added to the mean of squares.
        activation (`str`): `"silu"` or `"sigmoid"`.
    """
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    compile_ahead(rms_norm_gated, x, gate, weight, bias=None, activation=activation, eps=eps)
    return rms_norm_gated(x, gate, weight, None, activation, eps=eps)


class _Laid(NamedTuple):
    """The bounds of pieces and the piece of each chunk. Given only bounds, a kernel would read the rest from the
    device, and block the host."""

    for_chunks: dict[str, Tensor]  # arguments of kernels inside chunks
    for_states: dict[str, Tensor]  # arguments of kernels from chunk to chunk


@dataclass(frozen=True)  # all instances are equal, so that layers share laid tensors
class _FlaKernels:
    """Kernels on tensors `(1, tokens, heads, ...)`. Decays are cumulative sums inside chunks, as powers of 2."""

    kept = 2

    def lay(self, bounds: Sequence[int], device: torch.device) -> _Laid:
        counts = [-((start - stop) // _CHUNK) for start, stop in pairwise(bounds)]
        offsets = from_host([0, *accumulate(counts)], torch.int64, device)
        pieces = torch.arange(len(counts), device=device).repeat_interleave(offsets.diff(), output_size=sum(counts))
        chunks = torch.arange(len(pieces), device=device) - offsets[pieces]
        indices = torch.stack([pieces, chunks], dim=1).int()
        for_chunks = {"cu_seqlens": from_host(bounds, torch.int32, device), "chunk_indices": indices}
        return _Laid(for_chunks, {**for_chunks, "chunk_offsets": offsets})

    def prepare(self, inputs: Inputs, passing: Passing) -> Opaque:
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        _, k, v, g, beta = _rows(inputs)
        decay = chunk_local_cumsum(g, _CHUNK, scale=RCP_LN2, **passing.laid.for_chunks)
        w, u, inverse = chunk_gated_delta_rule_fwd_intra(
            k=k, v=v, g=decay, beta=beta, chunk_size=_CHUNK, **passing.laid.for_chunks
        )
        return decay, inverse, w, u

    def maps(self, inputs: Inputs, prepared: Opaque, passing: Passing) -> tuple[Tensor, Tensor]:
        decay, _, w, u = prepared
        k, keys, (heads, width) = inputs.k[None], inputs.k.shape[-1], u.shape[2:]
        nothing = k.new_zeros(len(passing.places), heads, keys, width, dtype=torch.float32)
        identity = torch.eye(keys, device=k.device).expand(*nothing.shape[:2], -1, -1).contiguous()
        states = _states(k, w, u, decay, nothing, passing, ends=True)[2]
        return states, _states(k, w, u.new_zeros(*u.shape[:3], keys), decay, identity, passing, ends=True)[2]

    def outputs(self, inputs: Inputs, prepared: Opaque, begin: Tensor, passing: Passing) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        decay, _, w, u = prepared
        q, k, v, *_ = _rows(inputs)
        states, values, _ = _states(k, w, u, decay, begin, passing)
        chunks = passing.laid.for_chunks
        out = chunk_fwd_o(q=q, k=k, v=values, h=states, g=decay, scale=_scale(q), chunk_size=_CHUNK, **chunks)
        return out[0].to(v.dtype)

    def begin_backward(
        self, inputs: Inputs, kept: Opaque, begin: Tensor, dout: Tensor, passing: Passing
    ) -> tuple[Tensor, Opaque]:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        decay, inverse = kept
        q, k, v, _, beta = _rows(inputs)
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=decay, **passing.laid.for_chunks)
        states, values, _ = _states(k, w, u, decay, begin, passing)
        dvalues = chunk_bwd_dv_local(
            q=q, k=k, g=decay, do=dout[None], scale=_scale(q), chunk_size=_CHUNK, **passing.laid.for_chunks
        )
        _, dbegin, _ = _dstates(q, k, w, decay, dout[None], dvalues, torch.zeros_like(begin), passing)
        return dbegin, (decay, inverse, w, states, values, dout[None], dvalues)

    def end_backward(self, inputs: Inputs, begun: Opaque, dend: Tensor, passing: Passing) -> Inputs:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd
        from fla.ops.utils import chunk_local_cumsum

        decay, inverse, w, states, values, dout, dvalues = begun
        q, k, v, _, beta = _rows(inputs)
        dstates, _, dvalues = _dstates(q, k, w, decay, dout, dvalues, dend, passing)
        chunks = passing.laid.for_chunks
        gradients = {"do": dout, "dh": dstates, "dv": dvalues}
        dq, dk, dw, ddecay = chunk_bwd_dqkwg(
            q=q, k=k, v=values, w=w, g=decay, h=states, scale=_scale(q), chunk_size=_CHUNK, **gradients, **chunks
        )
        more_k, dv, dbeta, more_decay = prepare_wy_repr_bwd(
            k=k, v=v, beta=beta, g=decay, A=inverse, dw=dw, du=dvalues, **chunks
        )
        dg = chunk_local_cumsum(ddecay.add_(more_decay), _CHUNK, reverse=True, **chunks)
        found = Inputs(dq, dk.add_(more_k), dv, dg, dbeta)
        return Inputs(*(gradient[0].to(own.dtype) for gradient, own in zip(found, inputs, strict=True)))


def compile_ahead(function: Callable[..., Any], *tensors: Tensor | None, packed: bool = False, **settings: Any) -> None:
    """See [`hf_burst.kernels.tuning.compile_ahead`], for functions of fla."""
    if not torch.compiler.is_compiling():
        tuning.compile_ahead(_of_meta(function), *tensors, packed=packed, **settings)


@cache
def _of_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is rehearsed. Where a package is there whose kernels fla calls in place of Triton's, it is
    not: what these do with tensors of `meta` is not known."""

    @wraps(function)
    def rehearsed(*tensors: Tensor | None, **settings: Any) -> Any:
        if others := [package for package in _OTHERS if find_spec(package)]:
            raise RuntimeError(f"fla calls the kernels of {others}")
        _take_devices_without_index()
        return function(*tensors, **settings)

    return rehearsed


@cache
def _take_devices_without_index() -> None:
    """Lets the functions by which fla asks for properties of a tensor's device take those of `meta`, which have no
    index, for the current one. Without this it would be another GPU, with other kernels."""

    def known(function: Any) -> Any:
        def of_device(*args: Any, **kwargs: Any) -> Any:
            return function(*(torch.cuda.current_device() if value is None else value for value in args), **kwargs)

        return of_device

    places = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for name in ("check_shared_mem", "get_multiprocessor_count"):
        own = vars(import_module("fla.utils")).get(name)
        for place in places if own else ():
            if vars(place).get(name) is own:
                setattr(place, name, known(own))


def in_two_passes(*inputs: Tensor) -> Tensor:
    """Computes a delta rule of one rank in two passes, as if a piece ended in the middle of it, for [`compile_ahead`].

    Args:
        inputs (five `torch.Tensor`): As in [`delta_rule_in_two_passes`].
    """
    return _InTwoPasses.apply(*(tensor.flatten(0, 1) for tensor in inputs))


class _InTwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> Tensor:
        inputs, kernels, bounds = Inputs(*rows), _FlaKernels(), [0, len(rows[0]) // 2, len(rows[0])]
        laid = kernels.lay(bounds, torch.device("cpu"))
        on_device = ({name: tensor.to(inputs.q.device) for name, tensor in part.items()} for part in laid)
        passing = Passing((0, 1), _Laid(*on_device))
        prepared = kernels.prepare(inputs, passing)
        states, _ = kernels.maps(inputs, prepared, passing)
        ctx.held = inputs, prepared[: kernels.kept], states, passing
        return kernels.outputs(inputs, prepared, states, passing)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Inputs:
        (inputs, kept, begin, passing), kernels = ctx.held, _FlaKernels()
        dbegin, begun = kernels.begin_backward(inputs, kept, begin, dout, passing)
        return kernels.end_backward(inputs, begun, dbegin, passing)


def _rows(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(tensor[None] for tensor in inputs)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _states(
    k: Tensor, w: Tensor, u: Tensor, decay: Tensor, begin: Tensor, passing: Passing, ends: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the state before each chunk, and the values minus the state's predictions of them; or, if `ends`, the
    final states of pieces as the third, by the same kernel variant, because tuning takes minutes."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    wanted = {"output_final_state": ends, "save_new_value": not ends}
    return chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=decay, initial_state=begin, chunk_size=_CHUNK, **wanted, **passing.laid.for_states
    )


def _dstates(
    q: Tensor, k: Tensor, w: Tensor, decay: Tensor, dout: Tensor, dvalues: Tensor, dend: Tensor, passing: Passing
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the states before chunks, of the states before pieces, and of values."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

    gradients = {"do": dout, "dv": dvalues, "dht": dend, "h0": dend}  # `h0` requests those of initial states
    return chunk_gated_delta_rule_bwd_dhu(
        q=q, k=k, w=w, g=decay, scale=_scale(q), chunk_size=_CHUNK, **gradients, **passing.laid.for_states
    )
