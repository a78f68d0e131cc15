"""A tile as pieces that a library's kernel can compute, with rows of their own, put together again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelError
from ..numerics import accumulation_dtype
from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, OutputBuffers, Outputs, Scores

# cu_seqlens of q and k, longest of q and k
Lengths = tuple[Tensor | None, Tensor | None, int, int]
# causal, window to the left, window to the right; `None` is unbounded
Window = tuple[bool, int | None, int | None]


@dataclass(frozen=True)
class Piece:
    """Some rows and columns of a tile, and the band between them, counted from their corner; for FlashAttention
    libraries also as the call that computes it."""

    rows: slice
    columns: slice
    band: Band
    lengths: Lengths = (None, None, 0, 0)
    window: Window = (False, None, None)

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def packed(self) -> bool:
        """Whether it is a call of variable length."""
        return self.lengths[0] is not None


class PiecewiseKernel:
    """A [`Kernel`] that computes a tile piece by piece. Subclasses cut the tile and compute a piece.

    Args:
        deterministic (`bool`, defaults to `False`): Whether `backward` gives the same bits each time, at some cost, if
            the capabilities say that it can.
    """

    capabilities: Capabilities
    module = ""  # of the library; empty for the kernels inside torch

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @cached_property
    def library(self) -> Any:
        """The module that is called. It is imported on first use, which takes seconds for some."""
        return import_module(self.module) if self.module else torch.ops.aten

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterable[Piece]:
        """Cuts the tile of these queries and keys. No row is in two pieces; rows in no piece see nothing."""
        raise NotImplementedError

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """`out` and `lse` of a piece, from its rows and columns. Only a piece that is the whole tile has buffers."""
        raise NotImplementedError

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """`dq`, `dk` and `dv` of a piece, from its rows and columns. Only a whole tile has buffers."""
        raise NotImplementedError

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        height, width = q.shape[1], k.shape[1]
        out = lse = None
        for piece in self.pieces(band, q, k):
            if piece.height == height and piece.width == width:
                return self.forward_piece(piece, q, k, v, scores, buffers)
            part, part_lse = self.forward_piece(
                piece, q[:, piece.rows], k[:, piece.columns], v[:, piece.columns], scores
            )
            if piece.height == height:
                return part, part_lse
            if out is None or lse is None:
                out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=part.dtype)
                lse = q.new_full(q.shape[:3], -torch.inf, dtype=part_lse.dtype)
            out[:, piece.rows], lse[:, piece.rows] = part, part_lse
        if out is None or lse is None:
            wide = accumulation_dtype(q.dtype)
            return q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        return out, lse

    def backward(self, inputs: BackwardInputs, band: Band, scores: Scores, buffers: OutputBuffers = ()) -> Gradients:
        """See [`Kernel.backward`]; gradients of several pieces are summed in fp32 (fp64 for fp64) and left so."""
        _, q, k, v, *_ = inputs
        sums = None
        for piece in self.pieces(band, q, k):
            rows, columns = piece.rows, piece.columns
            if piece.height == q.shape[1] and piece.width == k.shape[1]:
                return self.backward_piece(piece, inputs, scores, buffers)
            sums = sums or _wide_zeros(q, k, v)
            _add(sums, self.backward_piece(piece, inputs.cut(rows, columns), scores), piece)
        return sums or _wide_zeros(q, k, v)


class SquareKernel(PiecewiseKernel):
    """A [`PiecewiseKernel`] of whole tiles and causal squares, which computes documents one by one."""

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """See [`PiecewiseKernel.pieces`].

        Raises:
            KernelError: If the tile is neither whole nor causal from a corner.
        """
        for document in documents(band, q, k):
            for piece in causal_pieces(document):
                if piece.band not in (Band(), Band(low=0)):
                    raise KernelError(
                        f"{self.capabilities.name} computes whole tiles and causal squares, not the rows and columns "
                        f"of {band}. Set BurstConfig(kernel=...) to another one for this attention."
                    )
                yield piece


def documents(band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
    """The documents of a tile one by one, each cropped; the whole tile if it has no segments."""
    inner = Band(band.low, band.high)
    if not band.documents:
        yield from crop(Piece(slice(0, q.shape[1]), slice(0, k.shape[1]), inner))
    for span in pairwise(band.documents):
        yield from crop(Piece(slice(*span), slice(*span), inner))


def crop(piece: Piece) -> Iterator[Piece]:
    """The rows of a piece that see something and the columns that are seen, see [`Band.crop`]; none if it admits
    nothing."""
    cropped = piece.band.crop(piece.height, piece.width)
    if cropped is not None:
        (first, last), (left, right), band = cropped
        rows = slice(piece.rows.start + first, piece.rows.start + last)
        yield Piece(rows, slice(piece.columns.start + left, piece.columns.start + right), band)


def causal_pieces(piece: Piece) -> Iterator[Piece]:
    """A cropped piece without a limit behind: the rows whose causal mask ends at the bottom right corner, and the rows
    that see all columns."""
    rows, low = piece.rows, piece.band.low
    middle = rows.stop if low is None else rows.start + piece.width + low
    yield Piece(slice(rows.start, middle), piece.columns, piece.band)
    if middle < rows.stop:
        yield Piece(slice(middle, rows.stop), piece.columns, Band())


def blocks(piece: Piece, height: int) -> Iterator[Piece]:
    """A piece in blocks of at most `height` rows, each cropped; those that admit nothing are left out."""
    for first in range(0, piece.height, height):
        rows = slice(piece.rows.start + first, min(piece.rows.start + first + height, piece.rows.stop))
        yield from crop(Piece(rows, piece.columns, piece.band.shift(first)))


def _add(sums: Gradients, gradients: Gradients, piece: Piece) -> None:
    """A function of its own, so that nothing of a piece is left when the next one is computed."""
    for total, gradient, span in zip(sums, gradients, (piece.rows, piece.columns, piece.columns), strict=True):
        total[:, span] += gradient


def _wide_zeros(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    wide = accumulation_dtype(q.dtype)
    return (q.new_zeros(q.shape, dtype=wide), k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide))
