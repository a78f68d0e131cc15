"""The oracle: attention in plain torch, in fp32 or fp64, as the definition has it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from ..plan import Band
from .base import BackwardInputs, Capabilities, Gradients, OutputBuffers, Outputs, Scores, from_host
from .pieces import Piece, PiecewiseKernel, blocks, documents

_BLOCK_SCORES = 1 << 26  # the most that are in memory at once


class ReferenceKernel(PiecewiseKernel):
    """Plain torch, in blocks of rows that bound its memory. Slow, right by inspection, and it takes everything."""

    capabilities = Capabilities(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        most_head_dim=1 << 16,
        own_value_dim=True,
        wide=True,
        softcap=True,
        deterministic=True,
    )

    def pieces(self, band: Band, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """The tile whole if its scores are few, else its documents one by one, in blocks of rows."""
        rows, columns, scores_of_a_pair = q.shape[1], k.shape[1], q.shape[0] * q.shape[2]
        if scores_of_a_pair * rows * columns <= _BLOCK_SCORES:
            yield Piece(slice(0, rows), slice(0, columns), band)
            return
        for document in documents(band, q, k):
            yield from blocks(document, max(1, _BLOCK_SCORES // (scores_of_a_pair * document.width)))

    def forward_piece(
        self, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        logits = _logits(q, k, piece.band, scores)
        lse = logits.logsumexp(-1)
        weights = _weights(logits, lse)
        out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.to(weights.dtype)).flatten(2, 3)
        return out, lse.permute(0, 3, 1, 2).flatten(2)

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """See [`PiecewiseKernel.backward_piece`]; FlashAttention (arXiv 2205.14135), appendix B.2."""
        dout, q, k, v, _, lse, delta = inputs
        assert delta is not None, "the capabilities do not say derives_delta"
        heads = k.shape[2]
        logits = _logits(q, k, piece.band, scores)
        weights = _weights(logits, _by_head(lse, heads).to(logits.dtype))
        wide_dout, wide_q = (tensor.to(logits.dtype).unflatten(2, (heads, -1)) for tensor in (dout, q))
        wide_k, wide_v = k.to(logits.dtype), v.to(logits.dtype)
        dv = torch.einsum("bhgqk,bqhgd->bkhd", weights, wide_dout)
        dweights = torch.einsum("bqhgd,bkhd->bhgqk", wide_dout, wide_v)
        dlogits = weights * (dweights - _by_head(delta, heads).to(logits.dtype).unsqueeze(-1))
        if scores.softcap:  # the derivative of the hyperbolic tangent
            dlogits = dlogits * (1 - (logits.masked_fill(logits == -torch.inf, 0) / scores.softcap).square())
        dproducts = dlogits * scores.scale
        dq = torch.einsum("bhgqk,bkhd->bqhgd", dproducts, wide_k).flatten(2, 3)
        dk = torch.einsum("bhgqk,bqhgd->bkhd", dproducts, wide_q)
        return dq, dk, dv


def admitted(band: Band, rows: int, columns: int, device: torch.device) -> Tensor:
    """The mask of a tile: `torch.BoolTensor` of shape `(rows, columns)`, `True` where a row sees a column."""
    row, column = (torch.arange(size, dtype=torch.int32, device=device) for size in (rows, columns))
    row = row[:, None]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if band.low is not None:
        mask &= row - column >= band.low
    if band.high is not None:
        mask &= row - column <= band.high
    if band.documents:
        ends = from_host(band.documents[1:], torch.int32, device)
        mask &= torch.bucketize(row, ends, right=True) == torch.bucketize(column, ends, right=True)
    return mask


def _by_head(rows: Tensor, kv_heads: int) -> Tensor:
    """`(B, Sq, Hq)` as `(B, Hkv, Hq / Hkv, Sq)`."""
    return rows.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1)


def _logits(q: Tensor, k: Tensor, band: Band, scores: Scores) -> Tensor:
    """Scores of shape `(B, Hkv, Hq / Hkv, Sq, Sk)`, -inf where not admitted."""
    wide = accumulation_dtype(q.dtype)
    grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(wide)) * scores.scale
    if scores.softcap:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    return logits.masked_fill(~admitted(band, q.shape[1], k.shape[1], q.device), -torch.inf)


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """`exp(logits - lse)`, 0 where a row admits nothing."""
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0, torch.exp(logits - lse.unsqueeze(-1)))
