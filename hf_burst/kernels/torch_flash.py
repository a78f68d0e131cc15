"""The FlashAttention-2 kernels inside every CUDA build of torch: for GPUs, with no package beside torch.

Documents are one call of variable length, bands are the kernel's windows. Those are aligned at the bottom right corner,
and one as long as the keys counts as infinite, which is right only where there are no more rows than columns; taller
tiles are cut.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from .base import Band, Card, Scores
from .pieces import Piece, backward_pieces, crop, forward_pieces, shift


class TorchFlashKernel:
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`."""

    card = Card(
        name="torch_flash",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(8, 256),
        head_multiple=8,
        own_value_dim=False,
        wide=False,
        wants_out=True,
    )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""
        if band.segments:
            flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
            out, lse = _forward(*flat, *_varlen_call(band, q), scores.scale)
            return out.view(q.shape), lse.transpose(0, 1).unflatten(0, q.shape[:2])

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = (q[:, piece.rows], k[:, piece.columns], v[:, piece.columns])
            out, lse = _forward(*inputs, *_dense_call(piece), scores.scale)
            return out, lse.transpose(1, 2)

        return forward_pieces(q, v, _pieces(band, slice(0, q.shape[1]), slice(0, k.shape[1])), call)

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
        scores: Scores,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]."""
        assert out is not None, "the card says wants_out"
        if band.segments:
            flat = (tensor.flatten(0, 1) for tensor in (dout, q, k, v, out))
            flat_lse = lse.flatten(0, 1).transpose(0, 1)
            dq, dk, dv = _backward(*flat, flat_lse, *_varlen_call(band, q), scores.scale)
            return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, columns = piece.rows, piece.columns
            inputs = (dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows])
            return _backward(*inputs, lse[:, rows].transpose(1, 2), *_dense_call(piece), scores.scale)

        return backward_pieces((q, k, v), _pieces(band, slice(0, q.shape[1]), slice(0, k.shape[1])), call)


# cu_seqlens of q and k, longest of q and k; causal, window to the left, window to the right
Lengths = tuple[torch.Tensor | None, torch.Tensor | None, int, int]
Window = tuple[bool, int | None, int | None]


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, window: Window, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    causal, left, right = window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q.contiguous(), k.contiguous(), v.contiguous(), *lengths, 0.0, causal, False),
        **{"scale": scale, "window_size_left": left, "window_size_right": right},
    )
    return out, lse


def _backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, lengths, window, scale = arguments
    causal, left, right = window
    no_dropout = torch.empty(2, dtype=torch.uint64, device=tensors[0].device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(*(tensor.contiguous() for tensor in tensors), *lengths, 0.0, causal),
        *(no_dropout, torch.empty(0, device=tensors[0].device)),
        **{"scale": scale, "window_size_left": left, "window_size_right": right},
    )
    return dq, dk, dv


def _dense_call(piece: Piece) -> tuple[Lengths, Window]:
    """From the bottom right corner: left = high + Sk - Sq, right = Sq - Sk - low; a cropped piece keeps both >= 0."""
    band, ahead = piece.band, piece.width - piece.height
    lengths = (None, None, piece.height, piece.width)
    if band == Band(low=0) and ahead == 0:
        return lengths, (True, None, None)
    left = None if band.high is None else band.high + ahead
    return lengths, (False, left, None if band.low is None else -ahead - band.low)


def _varlen_call(band: Band, q: torch.Tensor) -> tuple[Lengths, Window]:
    bounds = _cumulative(band.segments, q.shape[0], q.device)
    longest = max(stop - start for start, stop in pairwise(band.segments))
    lengths = (bounds, bounds, longest, longest)
    if band.low == 0 and band.high is None:
        return lengths, (True, None, None)
    return lengths, (False, band.high, None if band.low is None else -band.low)


def _pieces(band: Band, rows: slice, columns: slice) -> Iterator[Piece]:
    """A block cut so that no banded piece has more rows than columns."""
    piece = crop(band, rows, columns)
    if piece is None:
        return
    if piece.band == Band() or piece.height <= piece.width:
        yield piece
        return
    middle = piece.rows.start + piece.width
    yield from _pieces(piece.band, slice(piece.rows.start, middle), piece.columns)
    yield from _pieces(shift(piece.band, piece.width), slice(middle, piece.rows.stop), piece.columns)


@lru_cache(maxsize=64)
def _cumulative(segments: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    """The boundaries of every row of the batch, on the device."""
    size = segments[-1]
    bounds = [row * size + stop for row in range(batch) for stop in segments[1:]]
    return torch.tensor([0, *bounds], dtype=torch.int32, device=device)
