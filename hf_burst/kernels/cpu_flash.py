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
        parts = []
        for rows, columns, causal, mask in _calls(band, q, k):
            parts.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    _heads_first(q[:, rows]),
                    _heads_first(k[:, columns]),
                    _heads_first(v[:, columns]),
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=scale,
                )
            )
        out = torch.cat([out for out, _ in parts], 2).transpose(1, 2)
        lse = torch.cat([lse for _, lse in parts], 2).transpose(1, 2)
        blind = _blind_rows(band, q.shape[1], k.shape[1])
        if blind is not None:  # the kernel leaves lse = 0 there
            out, lse = out.masked_fill(blind[:, None, None], 0), lse.masked_fill(blind[:, None], -torch.inf)
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
        parts = []
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(-inf - inf) = 0, exp(-inf + inf) would be NaN
        for rows, columns, causal, mask in _calls(band, q, k):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
            parts.append((columns, [gradient.transpose(1, 2) for gradient in gradients]))
        if len(parts) == 1 and parts[0][0] == slice(0, k.shape[1]):
            return tuple(parts[0][1])
        dq = torch.cat([gradients[0] for _, gradients in parts], 1)
        dk, dv = (torch.zeros(tensor.shape, dtype=lse.dtype) for tensor in (k, v))
        for columns, gradients in parts:
            dk[:, columns] += gradients[1]
            dv[:, columns] += gradients[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _blind_rows(band: Band, rows: int, columns: int) -> torch.Tensor | None:
    """Which rows of a tile without segments admit nothing; `None` if all see something."""
    if band.segments:
        return None  # squares: the diagonal is admitted, or the band is empty everywhere
    row = torch.arange(rows)
    first = row - band.high if band.high is not None else torch.zeros_like(row)
    last = row - band.low if band.low is not None else torch.full_like(row, columns - 1)
    blind = (first > columns - 1) | (last < 0)
    return blind if blind.any() else None


def _calls(band: Band, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
    """The calls that compute a tile: rows, columns, whether causal, and the mask of a block. The rows follow on."""
    squares = list(pairwise(band.segments))
    spans = [(square, square) for square in squares] or [((0, q.shape[1]), (0, k.shape[1]))]
    for (row0, row1), (column0, column1) in spans:
        rows, columns = row1 - row0, column1 - column0
        if band.high is None or band.high >= rows - 1:
            if band.low is None or band.low <= 1 - columns:
                yield slice(row0, row1), slice(column0, column1), False, None
                continue
            if band.low == 0 and rows == columns:
                yield slice(row0, row1), slice(column0, column1), True, None
                continue
        for first in range(0, rows, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, rows)
            start = 0 if band.high is None else min(max(0, first - band.high), columns - 1)
            stop = columns if band.low is None else max(min(columns, last - band.low), start + 1)
            shift = first - start
            moved = Band(
                None if band.low is None else band.low - shift, None if band.high is None else band.high - shift
            )
            mask = torch.zeros(1, 1, last - first, stop - start, dtype=q.dtype)
            mask.masked_fill_(~admitted(moved, last - first, stop - start, q.device), -torch.inf)
            yield slice(row0 + first, row0 + last), slice(column0 + start, column0 + stop), False, mask
