"""torch's CPU flash kernel, the embedded default: no scores in memory, native GQA.

It knows no documents and no bands. Documents are one call each. A band (a sliding window) is cut into blocks of rows,
each with the columns that it can see and a mask of that block only. bf16 and fp16 are computed in fp32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, OutputBuffers, Outputs, Scores
from .pieces import Piece, PiecewiseKernel, blocks, documents
from .reference import admitted

_BLOCK_ROWS = 512


class CpuFlashKernel(PiecewiseKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward."""

    capabilities = Capabilities(
        name="cpu_flash",
        devices=("cpu",),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        most_head_dim=1 << 16,
        wide=True,
        wants_out=True,
        derives_delta=True,
        deterministic=True,
    )

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """Documents one by one; whole where no mask is needed, else blocks of rows. No piece is empty, which would
        kill the process."""
        for piece in documents(band, q, k):
            yield from [piece] if piece.band == Band() or _is_causal_square(piece) else blocks(piece, _BLOCK_ROWS)

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        out, lse = self.library._scaled_dot_product_flash_attention_for_cpu(
            *map(_heads_first, (q, k, v)), **_keywords(piece, q, scores)
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        dq, dk, dv = self.library._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_heads_first, inputs.with_out), inputs.lse.transpose(1, 2), **_keywords(piece, inputs.q, scores)
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads_first(tensor: Tensor) -> Tensor:
    """`(B, H, S, D)` in fp32 or fp64, elements of a head side by side, which the kernel takes for granted."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (wide if wide.stride(-1) == 1 else wide.contiguous()).transpose(1, 2)


def _is_causal_square(piece: Piece) -> bool:
    """Whether the kernel's causal switch expresses the band."""
    return piece.band == Band(low=0) and piece.height == piece.width


def _keywords(piece: Piece, q: Tensor, scores: Scores) -> dict[str, Any]:
    """How scores are made, with a mask `(1, 1, height, width)` that is added to them where the kernel needs one."""
    causal, mask = _is_causal_square(piece), None
    if piece.band != Band() and not causal:
        mask = torch.zeros(1, 1, piece.height, piece.width, dtype=accumulation_dtype(q.dtype), device=q.device)
        mask.masked_fill_(~admitted(piece.band, piece.height, piece.width, q.device), -torch.inf)
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask, "scale": scores.scale}
