"""Memory-efficient attention inside torch (arXiv 2112.05682, by CUTLASS), which takes heads of any size.

It computes whole tiles, and causal ones that end at the bottom right corner. Other bands are computed in blocks of rows
with a mask that is added to the scores. Documents are one call each: in a call of variable length the log-sum-exp of
all of them would be padded to the longest. It has no key heads that several query heads share, so key heads are rows of
its batch: all heads that share one read it by a stride of 0, and the gradients that they have for it are summed. Its
backward pass takes for granted that `out` is contiguous.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..plan import Band
from .base import BackwardInputs, Gradients, OutputBuffers, Outputs, Scores
from .flash import FLASH, aligned
from .library import gpu_refusal
from .pieces import Piece, PiecewiseKernel, blocks, causal_pieces, documents
from .reference import admitted

_WHOLE, _CAUSAL = 0, 2  # no mask of its own; causal, counted from the bottom right corner
_LSE_ROWS = 32  # a log-sum-exp is padded to a multiple of it
_MASK_COLUMNS = 16  # rows of a mask begin at multiples of it
_FAR = 2**31  # elements to the last key, from which the library counts wrongly
_MASK_SIZE = 1 << 24  # pairs of a block that is computed with a mask


class TorchEfficientKernel(PiecewiseKernel):
    """`aten::_efficient_attention_forward` and `aten::_efficient_attention_backward`."""

    capabilities = replace(FLASH, name="torch_efficient", most_head_dim=1 << 16, own_value_dim=True, softcap=False)

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        return gpu_refusal((8, 0))

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """Documents one by one, as [`causal_pieces`], or in blocks of any band."""
        for document in documents(band, q, k):
            if document.band.high is None:
                yield from causal_pieces(document)
                continue
            for block in blocks(document, _block_height(document)):
                yield from causal_pieces(block) if block.band.high is None else (block,)

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        q, k, v = map(aligned, (q, k, v))
        out, lses = q.new_empty(*q.shape[:3], v.shape[3]), []
        rows = zip(_grouped(out, k), _grouped(q, k), _shared(k, q), _shared(v, q), strict=True)
        mask, kind = _mask(piece, q, k)
        for target, queries, keys, values in rows:
            part, lse, *_ = self.library._efficient_attention_forward(
                *(queries, keys, values, mask, None, None, None, None, 0.0, kind, True), scale=scores.scale
            )
            target.copy_(part)
            lses.append(lse[..., : piece.height].flatten(0, 1))
        return out, torch.stack(lses).transpose(1, 2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """See [`PiecewiseKernel.backward_piece`]; gradients of keys and values are in fp32."""
        dout, q, k, v, out = map(aligned, inputs.with_out)
        lse = functional.pad(inputs.lse.transpose(1, 2), (0, -piece.height % _LSE_ROWS), value=math.inf)
        dq, dk, dv = q.new_empty(q.shape), *(k.new_empty(t.shape, dtype=torch.float32) for t in (k, v))
        no_dropout = torch.empty((), dtype=torch.long, device=q.device)
        grouped = (_grouped(tensor, k) for tensor in (dout, q, out, dq))
        rows = zip(*grouped, _shared(k, q), _shared(v, q), lse.unflatten(1, (k.shape[2], -1)), dk, dv, strict=True)
        mask, kind = _mask(piece, q, k)
        for own_dout, queries, own_out, own_dq, keys, values, own_lse, own_dk, own_dv in rows:
            gradients = self.library._efficient_attention_backward(
                *(own_dout, queries, keys, values, mask, own_out.contiguous(), None, None, piece.height, piece.width),
                *(own_lse.contiguous(), 0.0, no_dropout, no_dropout, kind, False),
                **{"scale": scores.scale, "num_splits_key": 1 if self.deterministic else None},
            )
            own_dq.copy_(gradients[0])
            for target, gradient in ((own_dk, gradients[1]), (own_dv, gradients[2])):
                torch.sum(gradient.transpose(0, 1), 2, dtype=torch.float32, out=target)
        return dq, dk, dv


def _grouped(tensor: Tensor, k: Tensor) -> Iterator[Tensor]:
    """Views of the rows of a batch, `(B, S, Hq, D)`, with key heads as rows of their own: `(Hkv, S, Hq / Hkv, D)`."""
    yield from tensor.unflatten(2, (k.shape[2], -1)).transpose(1, 2)


def _shared(tensor: Tensor, q: Tensor) -> Iterator[Tensor]:
    """The same for keys or values, `(B, S, Hkv, D)`, which all query heads of a key head read."""
    share = q.shape[2] // tensor.shape[2]
    if tensor.shape[1] * tensor.stride(1) >= _FAR:
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield from tensor.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, share, -1)


def _block_height(piece: Piece) -> int:
    """So many rows that the mask of their block has at most `_MASK_SIZE` pairs: they see all columns, or `high - low`
    more than they are."""
    low, high = piece.band.low, piece.band.high
    height = _MASK_SIZE // piece.width
    if low is not None and high is not None:
        window = high - low
        height = max(height, math.isqrt(_MASK_SIZE + window * window // 4) - (window + 1) // 2)
    return max(1, height)


def _mask(piece: Piece, q: Tensor, k: Tensor) -> tuple[Tensor | None, int]:
    """What is added to the scores of a row of the batch, `(Hkv, Hq / Hkv, Sq, Sk)` in the dtype of q, and the kind of
    mask that the library makes itself."""
    if piece.band.high is None:
        return None, _WHOLE if piece.band.low is None else _CAUSAL
    height, width = piece.height, piece.width
    mask = q.new_zeros(height, width + -width % _MASK_COLUMNS)
    mask[:, :width].masked_fill_(~admitted(piece.band, height, width, q.device), -math.inf)
    return mask[:, :width].expand(k.shape[2], q.shape[2] // k.shape[2], -1, -1), _WHOLE
