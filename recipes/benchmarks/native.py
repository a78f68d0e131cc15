"""Attention kernels as their own packages offer them, and attention in fp64 to compare them with.

The fastest kernel that runs here is the limit of a benchmark: it computes a share of the heads and sends nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_burst.errors import ConfigError
from hf_burst.plan import Mask
from recipes.benchmarks.ranks import Ranks

AttendMasked = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask], torch.Tensor]


@dataclass(frozen=True)
class Native:
    """Causal attention of `(B, S, H, D)` tensors on one device, with autograd."""

    name: str  # as in `BurstConfig(kernel=...)`
    attend: AttendMasked  # computes out from q, k, v of one row and its mask


def choose_native(
    requested: str, ranks: Ranks, dtype: torch.dtype, head_dim: int, mask: Mask
) -> tuple[Native, list[str]]:
    """Chooses the kernel of the limit: the requested one, or for `"auto"` the fastest one that runs forward and
    backward here, on a mask of the kind that will be measured. All ranks choose alike.

    Returns:
        The kernel, and why faster ones cannot run.

    Raises:
        ConfigError: If no kernel runs.
    """
    refusals, known = list[str](), dict(_natives(ranks.device, head_dim, mask))
    for name in known if requested == "auto" else {requested} & known.keys():

        def trial(load: Callable[[], AttendMasked] = known[name]) -> AttendMasked:
            attend = load()
            shape = (1, mask.length, 2, head_dim)
            q, k, v = (torch.randn(shape, dtype=dtype, device=ranks.device, requires_grad=True) for _ in range(3))
            out = attend(q, k, v, mask)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            return attend

        attend, failure = ranks.attempt(trial)
        if attend is not None and failure is None:
            return Native(name, attend), refusals
        refusals.append(f"{name}: {failure}")
    reason = "; ".join(refusals) or f"it is none of the limit's (--burst kernel={requested} sets hf_burst's alone)"
    raise ConfigError(
        f"No kernel for --kernel {requested} on {ranks.device.type} in {dtype} with head size {head_dim}: {reason}. "
        f"Known here: {', '.join(known)}."
    )


def _natives(device: torch.device, head_dim: int, mask: Mask) -> list[tuple[str, Callable[[], AttendMasked]]]:
    """Names of kernels and functions that load them, the fastest first for a head size and a mask."""
    if device.type == "cpu":
        return [("cpu_flash", lambda: _cpu_flash)]
    if head_dim > 256:
        return [("ffpa", _ffpa), ("torch_efficient", lambda: _torch_efficient)]
    natives = {
        "flash_attn_4": _flash_attn_4,
        "torch_cudnn": lambda: _torch_cudnn,
        "flash_attn_2": _flash_attn_2,
        "torch_flash": lambda: _torch_flash,
    }
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) and head_dim == 256 and len(mask.documents) == 2 and mask.window is None:
        natives = {"flash_attn_4+torch_cudnn": lambda: _flash_attn_4_and_cudnn, **natives}
    order = list(natives) if capability >= (9, 0) else ["flash_attn_2", "torch_flash", "torch_cudnn", "flash_attn_4"]
    return [(name, natives[name]) for name in order]


def _flash_attn_4() -> AttendMasked:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return _flash(flash_attn_func, flash_attn_varlen_func, None)


def _flash_attn_4_and_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    _only_whole(mask, "cuDNN's backward pass")
    return _ForwardByFlashAttn4.apply(q, k, v)


class _ForwardByFlashAttn4(torch.autograd.Function):
    """Causal attention, forward by flash-attn 4 and backward by cuDNN: the fastest of both for heads of 256."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from flash_attn.cute import flash_attn_func

        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        return cast("torch.Tensor", out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        none = torch.empty((), dtype=torch.long, device=q.device)
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(tensor.contiguous().transpose(1, 2) for tensor in (dout, q, k, v, out)),
            lse.unsqueeze(-1),
            *(none, none, None, None, None, q.shape[1], k.shape[1], 0.0, True),
        )
        return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _flash_attn_2() -> AttendMasked:
    from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _flash(flash_attn_func, flash_attn_varlen_func, -1)


def _flash(dense: Callable[..., Any], varlen: Callable[..., Any], no_window: int | None) -> AttendMasked:
    """Joins the two functions of a FlashAttention package: whole sequences, and packed documents."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        window = (no_window if mask.window is None else mask.window, no_window if mask.window is None else 0)
        if len(mask.documents) == 2:
            return _first(dense(q, k, v, causal=True, window_size=window))
        bounds, longest = cu_seqlens(mask, q.device)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return _first(varlen(*flat, **lengths, causal=True, window_size=window)).unflatten(0, q.shape[:2])

    return attend


@lru_cache(maxsize=16)
def cu_seqlens(mask: Mask, device: torch.device) -> tuple[torch.Tensor, int]:
    """The documents' boundaries, as flash kernels take them, and the tokens of the longest document."""
    longest = max(stop - start for start, stop in pairwise(mask.documents))
    return torch.tensor(mask.documents, dtype=torch.int32, device=device), longest


def _first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output; some versions return the log-sum-exp behind it."""
    return result[0] if isinstance(result, tuple) else result


def _torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    window = {} if mask.window is None else {"window_size_left": mask.window, "window_size_right": 0}
    call = torch.ops.aten._flash_attention_forward
    if len(mask.documents) == 2:
        return _first(call(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, **window))
    bounds, longest = cu_seqlens(mask, q.device)
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    out = _first(call(*flat, bounds, bounds, longest, longest, 0.0, True, False, **window))
    return out.unflatten(0, q.shape[:2])


def _torch_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    _only_whole(mask, "torch's cuDNN kernel")
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, True)[0]
    return out.transpose(1, 2)


def _ffpa() -> AttendMasked:
    from ffpa_attn import ffpa_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        _only_whole(mask, "ffpa")
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: torch.Tensor = ffpa_attn_func(*heads_first, is_causal=True, enable_gqa=True, backend="cutedsl")
        return out.transpose(1, 2)

    return attend


def _torch_efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Torch's memory-efficient kernel, which shares no key heads: they are repeated."""
    _only_whole(mask, "torch's memory-efficient kernel")
    share = q.shape[2] // k.shape[2]
    heads_first = q.transpose(1, 2), *(tensor.repeat_interleave(share, 2).transpose(1, 2) for tensor in (k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """torch's kernel for CPUs. Documents and windows become a dense mask, since no speed is compared on CPUs."""
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    whole, added = len(mask.documents) == 2 and mask.window is None, None
    if not whole:
        added = torch.zeros(mask.length, mask.length, dtype=q.dtype).masked_fill_(~admitted(mask, q.device), -torch.inf)
    return _first(call(*heads_first, 0.0, whole, attn_mask=added)).transpose(1, 2)


def _only_whole(mask: Mask, kernel: str) -> None:
    if len(mask.documents) > 2 or mask.window is not None:
        raise ConfigError(f"{kernel} computes whole causal sequences only here, no documents and no windows.")


def admitted(mask: Mask, device: torch.device) -> torch.Tensor:
    """Whether each query sees each key: `torch.BoolTensor` of shape `(S, S)`."""
    position = torch.arange(mask.length, device=device)
    document = torch.bucketize(position, torch.tensor(mask.documents[1:], device=device), right=True)
    distance = position[:, None] - position
    visible = (document[:, None] == document) & (distance >= 0)
    return visible if mask.window is None else visible & (distance <= mask.window)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: Mask
) -> dict[str, torch.Tensor]:
    """Computes out, dq, dk and dv of attention in fp64, one key head after another.

    Queries and the gradient of the output have the shape `(B, S, Hq, D)`, keys and values `(B, S, Hkv, D)`.
    """
    visible, share, found = admitted(mask, q.device), q.shape[2] // k.shape[2], []
    for head in range(k.shape[2]):
        rows = slice(head * share, (head + 1) * share)
        parts = (q[:, :, rows], k[:, :, [head]], v[:, :, [head]])
        leaves = [tensor.double().detach().transpose(1, 2).requires_grad_() for tensor in parts]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*leaves, visible, enable_gqa=True)
        gradients = torch.autograd.grad(out, leaves, dout[:, :, rows].double().transpose(1, 2))
        found.append([tensor.transpose(1, 2) for tensor in (out.detach(), *gradients)])
    whole = [torch.cat(parts, dim=2) for parts in zip(*found, strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), whole, strict=True))
