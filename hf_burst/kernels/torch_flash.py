"""The FlashAttention-2 kernels inside every CUDA build of torch: for GPUs, with no package beside torch.

Documents are one call of variable length, bands are the kernel's windows, whose alignment is the bottom right corner.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from .base import Band, Card


class TorchFlashKernel:
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`."""

    card = Card(
        name="torch_flash",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(8, 256),
        head_multiple=8,
        own_value_dim=False,
        wants_out=True,
    )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""
        if band.segments:
            call = _varlen_call(band, q, scale)
            out, lse = _forward(_flat(q), _flat(k), _flat(v), call)
            return out.view_as(q), lse.transpose(0, 1).unflatten(0, q.shape[:2])
        rows, columns, cropped = band.crop(q.shape[1], k.shape[1])
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        if rows.start < rows.stop:
            q, k, v = q[:, rows], k[:, columns], v[:, columns]
            part, part_lse = _forward(q, k, v, _dense_call(cropped, q, k, scale))
            if part.shape == out.shape:
                return part, part_lse.transpose(1, 2)
            out[:, rows], lse[:, rows] = part, part_lse.transpose(1, 2)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor,
        band: Band,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]."""
        assert out is not None, "the card says wants_out"
        if band.segments:
            call = _varlen_call(band, q, scale)
            flat_lse = _flat(lse).transpose(0, 1).contiguous()
            flat = _backward(_flat(dout), _flat(q), _flat(k), _flat(v), _flat(out), flat_lse, call)
            dq, dk, dv = (part.view(q.shape[0], -1, *part.shape[1:]) for part in flat)
            return dq, dk, dv
        rows, columns, cropped = band.crop(q.shape[1], k.shape[1])
        if rows.start >= rows.stop:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        call = _dense_call(cropped, q[:, rows], k[:, columns], scale)
        parts = _backward(
            dout[:, rows],
            q[:, rows],
            k[:, columns],
            v[:, columns],
            out[:, rows],
            lse[:, rows].transpose(1, 2).contiguous(),
            call,
        )
        whole = []
        for part, tensor, kept in zip(parts, (q, k, v), (rows, columns, columns), strict=True):
            gradient = part
            if part.shape != tensor.shape:
                gradient = torch.zeros_like(tensor)
                gradient[:, kept] = part
            whole.append(gradient)
        return whole[0], whole[1], whole[2]


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q.contiguous(), k.contiguous(), v.contiguous()),
        *(call["cu_q"], call["cu_k"], call["max_q"], call["max_k"], 0.0, call["causal"], False),
        scale=call["scale"],
        window_size_left=call["left"],
        window_size_right=call["right"],
    )
    return out, lse


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_backward(
        *(tensor.contiguous() for tensor in (dout, q, k, v, out)),
        *(lse, call["cu_q"], call["cu_k"], call["max_q"], call["max_k"], 0.0, call["causal"]),
        *(no_dropout, torch.empty(0, device=q.device)),
        scale=call["scale"],
        window_size_left=call["left"],
        window_size_right=call["right"],
    )
    return gradients


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of the batch one after another: `(B * S, ...)`."""
    return tensor.flatten(0, 1)


def _dense_call(band: Band, q: torch.Tensor, k: torch.Tensor, scale: float) -> dict[str, Any]:
    """Windows from the bottom right corner: left = high + Sk - Sq and right = Sq - Sk - low, which `crop` keeps >= 0."""
    ahead = k.shape[1] - q.shape[1]
    call = {"cu_q": None, "cu_k": None, "max_q": q.shape[1], "max_k": k.shape[1], "scale": scale}
    if band.high is None and band.low == 0 and ahead == 0:
        return {**call, "causal": True, "left": None, "right": None}
    left = None if band.high is None else band.high + ahead
    right = None if band.low is None else -ahead - band.low
    return {**call, "causal": False, "left": left, "right": right}


def _varlen_call(band: Band, q: torch.Tensor, scale: float) -> dict[str, Any]:
    bounds = _cumulative(band.segments, q.shape[0], q.device)
    longest = max(stop - start for start, stop in pairwise(band.segments))
    causal = band.low == 0 and band.high is None
    return {
        **{"cu_q": bounds, "cu_k": bounds, "max_q": longest, "max_k": longest, "scale": scale, "causal": causal},
        "left": None if causal or band.high is None else band.high,
        "right": None if causal or band.low is None else -band.low,
    }


@lru_cache(maxsize=64)
def _cumulative(segments: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    """The boundaries of every row of the batch, on the device."""
    size = segments[-1]
    bounds = [row * size + stop for row in range(batch) for stop in segments[1:]]
    return torch.tensor([0, *bounds], dtype=torch.int32, device=device)
