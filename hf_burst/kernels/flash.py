"""A tile as calls of any FlashAttention library: dense ones for bands, one of variable length for documents.

All of them take `(B, S, H, D)` or `(T, H, D)` with `cu_seqlens`, any strides whose last is 1, windows that are counted
from the bottom right corner, and a log-sum-exp of `(B, H, S)` or `(H, T)`, which is returned and passed on as a view.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, OutputBuffers, Outputs, Scores, from_host
from .pieces import Piece, PiecewiseKernel, Window, crop

# how the packages call `Lengths`
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# capabilities that most FlashAttention libraries share
FLASH = Capabilities(
    name="",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    most_head_dim=256,
    head_multiple=8,
    wants_out=True,
    derives_delta=True,
    softcap=True,
    deterministic=True,
)


class FlashKernel(PiecewiseKernel):
    """The common part of all libraries. Subclasses launch a call, and cut pieces that its windows do not express."""

    def cut(self, piece: Piece) -> Iterator[Piece]:
        """The pieces, a call each, of a tile without segments."""
        return crop(piece)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """`out` and `lse` of one call, possibly written to `buffers`.

        Tensors have shapes `(B, S, H, D)`, and `lse` has `(B, H, S)`; `(T, H, D)` and `(H, T)` if the call is packed.
        """
        raise NotImplementedError

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """`dq`, `dk` and `dv` of one call. Shapes are those of `launch_forward`; either `out` or `delta` is `None`."""
        raise NotImplementedError

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterable[Piece]:
        if not band.documents:
            return _dense_calls(self, band, q.shape[1], k.shape[1])
        stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
        # a CUDA graph outlives a cache
        packed = _packed_calls.__wrapped__ if stream and torch.cuda.is_current_stream_capturing() else _packed_calls
        return packed(band, q.shape[0], q.device, stream)

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        if piece.packed:
            out, lse = self.launch_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), piece, scores)
            return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).permute(1, 2, 0)
        if buffers:
            out_buffer, lse_buffer = buffers
            buffers = (out_buffer, None if lse_buffer is None else lse_buffer.transpose(1, 2))
        out, lse = self.launch_forward(q, k, v, piece, scores, buffers)
        return out, lse.transpose(1, 2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        dout, q, k, v, out, lse, delta = inputs
        delta = delta if out is None else None
        if not piece.packed:
            delta = None if delta is None else delta.transpose(1, 2)
            inputs = BackwardInputs(dout, q, k, v, out, lse.transpose(1, 2), delta)
            return self.launch_backward(inputs, piece, scores, buffers)
        flat_dout, flat_q, flat_k, flat_v = dout.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        out, delta = None if out is None else out.flatten(0, 1), None if delta is None else _by_head(delta)
        flat = BackwardInputs(flat_dout, flat_q, flat_k, flat_v, out, _by_head(lse), delta)
        buffers = tuple(None if buffer is None else buffer.flatten(0, 1) for buffer in buffers)
        dq, dk, dv = self.launch_backward(flat, piece, scores, buffers)
        return dq.unflatten(0, q.shape[:2]), dk.unflatten(0, k.shape[:2]), dv.unflatten(0, v.shape[:2])


def window_of(band: Band, ahead: int) -> Window:
    """The window from the bottom right corner: left = high + `ahead`, right = -`ahead` - low, where `ahead` is Sk - Sq.
    A cropped piece keeps both >= 0."""
    if band.low == 0 and band.high is None and ahead == 0:
        return True, None, None
    return False, None if band.high is None else band.high + ahead, None if band.low is None else -ahead - band.low


def library_keywords(call: Piece, scores: Scores, no_window: int | None = -1) -> dict[str, Any]:
    """A call in the words that the packages share; `no_window` is how a library writes a missing window."""
    causal, left, right = call.window
    keywords: dict[str, Any] = {
        "softmax_scale": scores.scale,
        "causal": causal,
        "window_size_left": no_window if left is None else left,
        "window_size_right": no_window if right is None else right,
        "softcap": scores.softcap,
    }
    if call.packed:
        keywords.update(zip(LENGTHS, call.lengths, strict=True))
    return keywords


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if its heads are contiguous and begin at multiples of 16 bytes, as kernels take for granted; a
    contiguous copy if not."""
    step = 16 // tensor.element_size()
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    fits = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and not any(s % step for s in strides[:-1])
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def gradient_buffers(inputs: BackwardInputs, buffers: OutputBuffers) -> dict[str, Tensor]:
    """The buffers of `dq`, `dk` and `dv`, or new tensors, for a library that writes where it is told."""
    likes = zip(("dq", "dk", "dv"), inputs[1:4], buffers or (None, None, None), strict=True)
    return {name: like.new_empty(like.shape) if buffer is None else buffer for name, like, buffer in likes}


def _by_head(rows: Tensor) -> Tensor:
    """`(B, S, H)` as `(H, B * S)`: a view of one batch row that is stored by head."""
    return rows.permute(2, 0, 1).flatten(1)


@lru_cache(maxsize=1024)
def _dense_calls(kernel: FlashKernel, band: Band, rows: int, columns: int) -> tuple[Piece, ...]:
    """The calls that compute a band without segments."""
    return tuple(
        replace(
            piece,
            lengths=(None, None, piece.height, piece.width),
            window=window_of(piece.band, ahead=piece.width - piece.height),
        )
        for piece in kernel.cut(Piece(slice(0, rows), slice(0, columns), band))
    )


@lru_cache(maxsize=64)
def _packed_calls(band: Band, batch: int, device: torch.device, stream: torch.cuda.Stream | None) -> tuple[Piece]:
    """The call that computes all documents of all batch rows. Their boundaries lie on the device, for each stream its
    own, since another stream would not wait for the copy."""
    size = band.documents[-1]
    stops = [row * size + stop for row in range(batch) for stop in band.documents[1:]]
    bounds = from_host([0, *stops], torch.int32, device)
    longest = max(stop - start for start, stop in pairwise(band.documents))
    whole = slice(0, size)
    return (Piece(whole, whole, band, (bounds, bounds, longest, longest), window_of(band, ahead=0)),)
