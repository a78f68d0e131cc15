"""A tile as the calls that a library's kernel can make: pieces with rows of their own, put together again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .base import Band


@dataclass(frozen=True)
class Piece:
    """Some rows of a tile, all columns that they see, and the band between them."""

    rows: slice
    columns: slice
    band: Band

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


AnyPiece = TypeVar("AnyPiece", bound=Piece)


def crop(band: Band, rows: slice, columns: slice) -> Piece | None:
    """The rows of a block that see something and the columns that are seen; `None` if nothing is admitted.

    In the piece every row sees a column, every column is seen, and a bound that binds nothing is `None`.

    Args:
        band ([`Band`]): Without segments; counted from the corner of the block.
        rows (`slice`): The rows of the block in its tile.
        columns (`slice`): The columns of the block in its tile.
    """
    height, width = rows.stop - rows.start, columns.stop - columns.start
    first = 0 if band.low is None else max(0, band.low)
    last = height if band.high is None else min(height, width + band.high)
    left = 0 if band.high is None else max(0, first - band.high)
    right = width if band.low is None else min(width, last - band.low)
    if first >= last or left >= right:
        return None
    moved = shift(band, first - left)
    low = None if moved.low is None or moved.low <= left - right + 1 else moved.low
    high = None if moved.high is None or moved.high >= last - first - 1 else moved.high
    return Piece(
        slice(rows.start + first, rows.start + last),
        slice(columns.start + left, columns.start + right),
        Band(low, high),
    )


def shift(band: Band, rows: int) -> Band:
    """The band as counted from a corner that lies `rows` further down."""
    return Band(
        None if band.low is None else band.low - rows,
        None if band.high is None else band.high - rows,
    )


def forward_pieces(
    q: torch.Tensor,
    v: torch.Tensor,
    pieces: Iterable[AnyPiece],
    call: Callable[[AnyPiece], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` of a tile, as [`Kernel.forward`] returns them; rows that no piece holds see nothing."""
    whole = q.shape[1]
    out = lse = None
    for piece in pieces:
        part, part_lse = call(piece)
        if piece.height == whole:
            return part, part_lse
        if out is None or lse is None:
            out = torch.zeros(*q.shape[:3], v.shape[3], dtype=part.dtype, device=q.device)
            lse = torch.full(q.shape[:3], -torch.inf, dtype=part_lse.dtype, device=q.device)
        out[:, piece.rows], lse[:, piece.rows] = part, part_lse
    if out is None or lse is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    return out, lse


def backward_pieces(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pieces: Iterable[AnyPiece],
    call: Callable[[AnyPiece], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dq`, `dk` and `dv` of a tile; those of several pieces are summed in fp32 (fp64 for fp64) and left so."""
    q, k, _ = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    sums: list[torch.Tensor] = []
    for piece in pieces:
        parts = call(piece)
        if piece.height == q.shape[1] and piece.width == k.shape[1]:
            return parts
        if not sums:
            sums = [torch.zeros(tensor.shape, dtype=wide, device=tensor.device) for tensor in inputs]
        for total, part, place in zip(sums, parts, (piece.rows, piece.columns, piece.columns), strict=True):
            total[:, place] += part
    if not sums:
        sums = [tensor.new_zeros(tensor.shape, dtype=wide) for tensor in inputs]
    return sums[0], sums[1], sums[2]
