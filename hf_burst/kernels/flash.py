"""A tile as calls of a FlashAttention library, whichever: dense ones for bands, one of variable length for documents.

All of them take `(B, S, H, D)` or `(T, H, D)` with `cu_seqlens`, any strides whose last is 1, windows that are counted
from the bottom right corner, and a log-sum-exp of `(B, H, S)` or `(H, T)`, which is returned and passed on as a view.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .base import Band, Capabilities, OutputBuffers, Scores, from_host
from .pieces import Piece, backward_pieces, crop, forward_pieces

# cu_seqlens of q and k, longest of q and k; causal, window to the left, window to the right
Lengths = tuple[torch.Tensor | None, torch.Tensor | None, int, int]
Window = tuple[bool, int | None, int | None]


class Call(NamedTuple):
    """What a library is told of a piece of a tile beside its tensors."""

    lengths: Lengths
    window: Window
    scores: Scores

    @property
    def packed(self) -> bool:
        """Whether it is one of variable length."""
        return self.lengths[0] is not None


class Given(NamedTuple):
    """What a backward call reads: `(B, S, H, D)` or `(T, H, D)`, and per row `(B, H, S)` or `(H, T)`. Either `out` or
    `delta` is there."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None
    lse: torch.Tensor
    delta: torch.Tensor | None
    into: OutputBuffers | None = None

    def empty_gradients(self) -> dict[str, torch.Tensor]:
        """For a library that writes `dq`, `dk` and `dv` where it is told."""
        places = self.into or (None, None, None)
        likes = zip(("dq", "dk", "dv"), (self.q, self.k, self.v), places, strict=True)
        return {name: like.new_empty(like.shape) if place is None else place for name, like, place in likes}


@dataclass(frozen=True)
class CalledPiece(Piece):
    """A piece, and how a library is told of it."""

    call: Call


class FlashKernel:
    """What the libraries share. Each says how it is launched, and what its windows do not express.

    Args:
        deterministic (`bool`, defaults to `False`): Whether `backward` gives the same bits each time, at some cost.
        library (module, *optional*): In place of the library, for tests.
    """

    capabilities: Capabilities

    def __init__(self, deterministic: bool = False, library: Any = None) -> None:
        self.deterministic = deterministic
        self._library = library

    @property
    def library(self) -> Any:
        """What is called; imported when it is, which takes seconds for some."""
        if self._library is None:
            self._library = self.load()
        return self._library

    def load(self) -> Any:
        """Imports the library; the kernels inside torch by default."""
        return torch.ops.aten

    def pieces(self, band: Band, rows: slice, columns: slice) -> Iterator[Piece]:
        """The calls that compute a band."""
        piece = crop(band, rows, columns)
        if piece is not None:
            yield piece

    def dense_call(self, piece: Piece) -> tuple[Lengths, Window]:
        """How a piece is told."""
        return dense_call(piece)

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: OutputBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` and `lse` of one call, possibly written `into` tensors of these shapes."""
        raise NotImplementedError

    def launch_backward(self, given: Given, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq`, `dk` and `dv` of one call."""
        raise NotImplementedError

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
        if band.segments:
            flat = Call(*varlen_call(band, q), scores)
            out, lse = self.launch_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), flat)
            return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).permute(1, 2, 0)
        pieces = _called_pieces(self, band, q.shape[1], k.shape[1], scores)
        if len(pieces) == 1 and _is_whole(pieces[0], q, k):
            places = None
            if into is not None:
                place, lse_place = into
                places = (place, None if lse_place is None else lse_place.transpose(1, 2))
            out, lse = self.launch_forward(q, k, v, pieces[0].call, places)
            return out, lse.transpose(1, 2)

        def call(piece: CalledPiece) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = (q[:, piece.rows], k[:, piece.columns], v[:, piece.columns])
            out, lse = self.launch_forward(*inputs, piece.call)
            return out, lse.transpose(1, 2)

        return forward_pieces(q, v, pieces, call)

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
        assert out is not None or not self.capabilities.wants_out, "the card says wants_out"
        delta = delta if out is None else None
        if band.segments:
            given = Given(
                *(dout.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)),
                None if out is None else out.flatten(0, 1),
                _by_head(lse),
                None if delta is None else _by_head(delta),
                None if into is None else tuple(None if place is None else place.flatten(0, 1) for place in into),
            )
            dq, dk, dv = self.launch_backward(given, Call(*varlen_call(band, q), scores))
            return dq.unflatten(0, q.shape[:2]), dk.unflatten(0, k.shape[:2]), dv.unflatten(0, v.shape[:2])
        pieces = _called_pieces(self, band, q.shape[1], k.shape[1], scores)
        if len(pieces) == 1 and _is_whole(pieces[0], q, k):
            scalars = (lse.transpose(1, 2), None if delta is None else delta.transpose(1, 2))
            return self.launch_backward(Given(dout, q, k, v, out, *scalars, into), pieces[0].call)

        def call(piece: CalledPiece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, columns = piece.rows, piece.columns
            given = Given(
                *(dout[:, rows], q[:, rows], k[:, columns], v[:, columns], None if out is None else out[:, rows]),
                *(lse[:, rows].transpose(1, 2), None if delta is None else delta[:, rows].transpose(1, 2)),
            )
            return self.launch_backward(given, piece.call)

        return backward_pieces((q, k, v), pieces, call)


@lru_cache(maxsize=1024)
def _called_pieces(kernel: FlashKernel, band: Band, rows: int, columns: int, scores: Scores) -> tuple[CalledPiece, ...]:
    """The calls that compute a band without segments."""
    pieces = kernel.pieces(band, slice(0, rows), slice(0, columns))
    return tuple(
        CalledPiece(piece.rows, piece.columns, piece.band, Call(*kernel.dense_call(piece), scores)) for piece in pieces
    )


def _is_whole(piece: Piece, q: torch.Tensor, k: torch.Tensor) -> bool:
    return piece.height == q.shape[1] and piece.width == k.shape[1]


def dense_call(piece: Piece) -> tuple[Lengths, Window]:
    """From the bottom right corner: left = high + Sk - Sq, right = Sq - Sk - low; a cropped piece keeps both >= 0."""
    band, ahead = piece.band, piece.width - piece.height
    lengths = (None, None, piece.height, piece.width)
    if band == Band(low=0) and ahead == 0:
        return lengths, (True, None, None)
    left = None if band.high is None else band.high + ahead
    return lengths, (False, left, None if band.low is None else -ahead - band.low)


def varlen_call(band: Band, q: torch.Tensor) -> tuple[Lengths, Window]:
    """Documents, in each of which there are as many rows as columns."""
    stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
    # a CUDA graph outlives what is remembered here
    documents = _documents.__wrapped__ if stream and torch.cuda.is_current_stream_capturing() else _documents
    bounds, longest = documents(band, q.shape[0], q.device, stream)
    lengths = (bounds, bounds, longest, longest)
    if band.low == 0 and band.high is None:
        return lengths, (True, None, None)
    return lengths, (False, band.high, None if band.low is None else -band.low)


def unbounded_is_negative(window: Window) -> tuple[bool, int, int]:
    """As most libraries write it: -1 for no window."""
    causal, left, right = window
    return causal, -1 if left is None else left, -1 if right is None else right


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its heads are contiguous and begin at multiples of 16 bytes, as kernels take for granted; a
    contiguous copy if not."""
    step = 16 // tensor.element_size()
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    fits = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and not any(s % step for s in strides[:-1])
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """`(B, S, H)` as `(H, B * S)`: a view of one batch row that is stored by head."""
    return rows.permute(2, 0, 1).flatten(1)


@lru_cache(maxsize=64)
def _documents(
    band: Band, batch: int, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[torch.Tensor, int]:
    """The boundaries of every row of the batch, on the device, and the longest document; of each stream its own, since
    another one would not wait until they are there."""
    size = band.segments[-1]
    bounds = [row * size + stop for row in range(batch) for stop in band.segments[1:]]
    longest = max(stop - start for start, stop in pairwise(band.segments))
    return from_host([0, *bounds], torch.int32, device), longest
