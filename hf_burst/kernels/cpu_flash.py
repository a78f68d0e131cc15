"""torch's CPU flash kernel, the embedded default: no scores in memory, native GQA.

What it does not know is translated here: documents are one call each, and a band (a sliding window) is cut into blocks
of rows, each with the columns that it can see and a mask of that block only. bf16 and fp16 are computed in fp32.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from .base import Band, Capabilities, OutputBuffers, Scores
from .pieces import Piece, backward_pieces, crop, forward_pieces, shift
from .reference import admitted

_BLOCK_ROWS = 512


class CpuFlashKernel:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward."""

    capabilities = Capabilities(
        name="cpu_flash",
        devices=("cpu",),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        head_dims=(1, 1 << 16),
        head_multiple=1,
        own_value_dim=False,
        wide=True,
        wants_out=True,
        deterministic=True,
        derives_delta=True,
    )

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
            causal, mask = _causal_or_mask(piece, q)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[:, piece.rows]),
                _heads_first(k[:, piece.columns]),
                _heads_first(v[:, piece.columns]),
                0.0,
                causal,
                attn_mask=mask,
                scale=scores.scale,
            )
            return out.transpose(1, 2), lse.transpose(1, 2)

        return forward_pieces(q, v, _pieces(band, q.shape[1], k.shape[1]), call)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        band: Band,
        scores: Scores,
        into: OutputBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]."""
        assert out is not None, "the card says wants_out"

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            causal, mask = _causal_or_mask(piece, q)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout[:, piece.rows]),
                _heads_first(q[:, piece.rows]),
                _heads_first(k[:, piece.columns]),
                _heads_first(v[:, piece.columns]),
                _heads_first(out[:, piece.rows]),
                lse[:, piece.rows].transpose(1, 2),
                0.0,
                causal,
                attn_mask=mask,
                scale=scores.scale,
            )
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

        return backward_pieces((q, k, v), _pieces(band, q.shape[1], k.shape[1]), call)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """`(B, H, S, D)` in fp32 or fp64, elements of a head side by side, which the kernel takes for granted."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide if wide.stride(-1) == 1 else wide.contiguous()).transpose(1, 2)


def _causal_or_mask(piece: Piece, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """How the kernel is told of a band: nothing, its causal switch, or a mask that is added to the scores."""
    if piece.band == Band():
        return False, None
    if piece.band == Band(low=0) and piece.height == piece.width:
        return True, None
    wide = torch.promote_types(q.dtype, torch.float32)
    mask = torch.zeros(1, 1, piece.height, piece.width, dtype=wide, device=q.device)
    return False, mask.masked_fill_(~admitted(piece.band, piece.height, piece.width, q.device), -torch.inf)


def _pieces(band: Band, rows: int, columns: int) -> Iterator[Piece]:
    """Documents one by one; whole where no mask is needed, else blocks of rows. None is empty, which would kill the
    process."""
    spans = [(slice(*span), slice(*span)) for span in pairwise(band.segments)] or [(slice(0, rows), slice(0, columns))]
    for row_span, column_span in spans:
        piece = crop(Band(band.low, band.high), row_span, column_span)
        if piece is None:
            continue
        if piece.band == Band() or (piece.band == Band(low=0) and piece.height == piece.width):
            yield piece
            continue
        for first in range(0, piece.height, _BLOCK_ROWS):
            block = slice(piece.rows.start + first, min(piece.rows.start + first + _BLOCK_ROWS, piece.rows.stop))
            cropped = crop(shift(piece.band, first), block, piece.columns)
            assert cropped is not None, "every row of a piece sees a column"
            yield cropped
