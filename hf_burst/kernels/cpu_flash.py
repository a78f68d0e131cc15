"""torch's CPU flash kernel, the embedded default: no scores in memory, native GQA, fp64 to fp16.

What it does not know is translated here: documents are one call each, and a band (a sliding window) is cut into blocks
of rows, each with the columns that it can see and a mask of that block only.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from .base import Band, Card
from .reference import admitted

_BLOCK_ROWS = 512


class CpuFlashKernel:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward."""

    card = Card(
        name="cpu_flash",
        devices=("cpu",),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        head_dims=(1, 1 << 16),
        head_multiple=1,
        own_value_dim=False,
        wants_out=True,
    )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for rows, columns, causal, mask in _calls(band, q, k):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[:, rows]),
                _heads_first(k[:, columns]),
                _heads_first(v[:, columns]),
                0.0,
                causal,
                attn_mask=mask,
                scale=scale,
            )
            part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
            if part.shape == out.shape:
                return part, part_lse
            out[:, rows], lse[:, rows] = part, part_lse
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
        dq, dk, dv = (tensor.new_zeros(tensor.shape, dtype=lse.dtype) for tensor in (q, k, v))
        for rows, columns, causal, mask in _calls(band, q, k):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout[:, rows]),
                _heads_first(q[:, rows]),
                _heads_first(k[:, columns]),
                _heads_first(v[:, columns]),
                _heads_first(out[:, rows]),
                lse[:, rows].transpose(1, 2),
                0.0,
                causal,
                attn_mask=mask,
                scale=scale,
            )
            dq_part, dk_part, dv_part = (part.transpose(1, 2) for part in parts)
            if dq_part.shape == q.shape and dk_part.shape == k.shape:
                return dq_part, dk_part, dv_part
            dq[:, rows] += dq_part
            dk[:, columns] += dk_part
            dv[:, columns] += dv_part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """`(B, H, S, D)`, with elements of a head side by side, which the kernel takes for granted."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).transpose(1, 2)


def _calls(band: Band, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
    """The calls that compute a tile: rows, columns, whether causal, and the mask of a block. No row twice."""
    if band.segments:
        for start, stop in pairwise(band.segments):
            yield from _square_or_band(Band(band.low, band.high), slice(start, stop), slice(start, stop), q)
        return
    rows, columns, cropped = band.crop(q.shape[1], k.shape[1])
    if rows.start < rows.stop:  # an empty call kills the process
        yield from _square_or_band(cropped, rows, columns, q)


def _square_or_band(
    band: Band, rows: slice, columns: slice, q: torch.Tensor
) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
    height, width = rows.stop - rows.start, columns.stop - columns.start
    open_low, open_high = band.low is None or band.low <= 1 - width, band.high is None or band.high >= height - 1
    if open_high and (open_low or (band.low == 0 and height == width)):
        yield rows, columns, not open_low, None
        return
    for first in range(0, height, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, height)
        shifted = Band(None if band.low is None else band.low - first, None if band.high is None else band.high - first)
        block_rows, block_columns, block = shifted.crop(last - first, width)
        size = (block_rows.stop - block_rows.start, block_columns.stop - block_columns.start)
        mask = torch.zeros(1, 1, *size, dtype=q.dtype, device=q.device)
        mask.masked_fill_(~admitted(block, *size, q.device), -torch.inf)
        yield (
            slice(rows.start + first + block_rows.start, rows.start + first + block_rows.stop),
            slice(columns.start + block_columns.start, columns.start + block_columns.stop),
            False,
            mask,
        )
