"""The FlashAttention-2 kernels inside every CUDA build of torch: for GPUs, with no package beside torch.

A window as long as the keys counts as infinite, which is right only where there are no more rows than columns; taller
tiles are cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .base import Band, Capabilities, OutputBuffers
from .flash import Call, FlashKernel, Given, Lengths, Window, aligned, dense_call
from .library import gpu_refusal
from .pieces import Piece, crop, shift


class Flash2Kernel(FlashKernel):
    """What the FlashAttention-2 kernels have in common, in torch and in their package."""

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        """See [`Kernel.unavailable`]."""
        refusal = gpu_refusal((8, 0))
        if refusal is None and 192 < head_dim <= 224 and torch.cuda.get_device_capability() in _LITTLE_SHARED_MEMORY:
            return f"has no backward for head size {head_dim} on this GPU, which has too little shared memory"
        return refusal

    def pieces(self, band: Band, rows: slice, columns: slice) -> Iterator[Piece]:
        """See [`FlashKernel.pieces`]."""
        return _pieces(band, rows, columns)

    def dense_call(self, piece: Piece) -> tuple[Lengths, Window]:
        """See [`FlashKernel.dense_call`]."""
        return _dense_call(piece)


class TorchFlashKernel(Flash2Kernel):
    """`aten::_flash_attention_forward` and `aten::_flash_attention_backward`."""

    capabilities = Capabilities(
        name="torch_flash",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(8, 256),
        head_multiple=8,
        own_value_dim=False,
        wide=False,
        wants_out=True,
        deterministic=True,
        derives_delta=True,
    )

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: OutputBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_forward`]."""
        causal, left, right = call.window
        out, lse, *_ = self.library._flash_attention_forward(
            *(aligned(q), aligned(k), aligned(v), *call.lengths, 0.0, causal, False),
            **{"scale": call.scores.scale, "window_size_left": left, "window_size_right": right},
        )
        return out, lse

    def launch_backward(self, given: Given, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`FlashKernel.launch_backward`]."""
        assert given.out is not None, "the card says wants_out"
        causal, left, right = call.window
        no_dropout = torch.empty(2, dtype=torch.uint64, device=given.q.device)
        with _deterministic_algorithms(self.deterministic):
            dq, dk, dv = self.library._flash_attention_backward(
                *map(aligned, (given.dout, given.q, given.k, given.v, given.out)),
                given.lse.contiguous(),  # its strides are not asked for
                *(*call.lengths, 0.0, causal, no_dropout, torch.empty(0, device=given.q.device)),
                **{"scale": call.scores.scale, "window_size_left": left, "window_size_right": right},
            )
        return dq, dk, dv


_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """aten asks this switch of the process which backward to take, and offers no argument."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warns):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _dense_call(piece: Piece) -> tuple[Lengths, Window]:
    """As [`dense_call`], of a piece whose windows are shorter than its keys."""
    lengths, window = dense_call(piece)
    assert all(side is None or side < piece.width for side in window[1:]), f"{piece} has a window that is infinite"
    return lengths, window


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
