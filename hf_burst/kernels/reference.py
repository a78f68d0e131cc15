"""The oracle: attention in plain torch, in fp32 or fp64, as the definition has it."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from .base import Band, Capabilities, OutputBuffers, Scores, from_host
from .pieces import Piece, backward_pieces, crop, forward_pieces, shift

_BLOCK_SCORES = 1 << 26  # that many are in memory at once


class ReferenceKernel:
    """Plain torch, in blocks of rows that bound its memory. Slow, right by inspection, and it takes everything."""

    capabilities = Capabilities(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        head_dims=(1, 1 << 16),
        head_multiple=1,
        own_value_dim=True,
        wide=True,
        wants_out=False,
        softcap=True,
        deterministic=True,
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
            logits = _logits(q[:, piece.rows], k[:, piece.columns], piece.band, scores)
            lse = logits.logsumexp(-1)
            weights = _weights(logits, lse)
            out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v[:, piece.columns].to(weights.dtype)).flatten(2, 3)
            return out, lse.permute(0, 3, 1, 2).flatten(2)

        return forward_pieces(q, v, _pieces(band, q, k), call)

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
        """See [`Kernel.backward`]; FlashAttention (arXiv 2205.14135), appendix B.2."""
        assert delta is not None, "the card does not say derives_delta"
        heads = k.shape[2]

        def call(piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, columns = piece.rows, piece.columns
            logits = _logits(q[:, rows], k[:, columns], piece.band, scores)
            weights = _weights(logits, _by_head(lse[:, rows], heads).to(logits.dtype))
            wide_dout, wide_q = (tensor[:, rows].to(logits.dtype).unflatten(2, (heads, -1)) for tensor in (dout, q))
            wide_k, wide_v = k[:, columns].to(logits.dtype), v[:, columns].to(logits.dtype)
            dv = torch.einsum("bhgqk,bqhgd->bkhd", weights, wide_dout)
            dweights = torch.einsum("bqhgd,bkhd->bhgqk", wide_dout, wide_v)
            dlogits = weights * (dweights - _by_head(delta[:, rows], heads).to(logits.dtype).unsqueeze(-1))
            if scores.softcap:  # the derivative of the hyperbolic tangent
                dlogits = dlogits * (1 - (logits.masked_fill(logits == -torch.inf, 0) / scores.softcap).square())
            dproducts = dlogits * scores.scale
            dq = torch.einsum("bhgqk,bkhd->bqhgd", dproducts, wide_k).flatten(2, 3)
            dk = torch.einsum("bhgqk,bqhgd->bkhd", dproducts, wide_q)
            return dq, dk, dv

        return backward_pieces((q, k, v), _pieces(band, q, k), call)


def admitted(band: Band, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The mask of a tile: `torch.BoolTensor` of shape `(rows, columns)`, `True` where a row sees a column."""
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if band.low is not None:
        mask &= row - column >= band.low
    if band.high is not None:
        mask &= row - column <= band.high
    if band.segments:
        ends = from_host(band.segments[1:], torch.int64, device)
        mask &= torch.bucketize(row, ends, right=True) == torch.bucketize(column, ends, right=True)
    return mask


def _pieces(band: Band, q: torch.Tensor, k: torch.Tensor) -> Iterator[Piece]:
    """The tile whole if its scores are few, else its documents one by one, in blocks of rows."""
    rows, columns, each = q.shape[1], k.shape[1], q.shape[0] * q.shape[2]
    if each * rows * columns <= _BLOCK_SCORES:
        yield Piece(slice(0, rows), slice(0, columns), band)
        return
    spans = [(slice(*span), slice(*span)) for span in pairwise(band.segments)] or [(slice(0, rows), slice(0, columns))]
    for row_span, column_span in spans:
        height = max(1, _BLOCK_SCORES // (each * (column_span.stop - column_span.start)))
        for first in range(row_span.start, row_span.stop, height):
            block = slice(first, min(first + height, row_span.stop))
            piece = crop(shift(Band(band.low, band.high), first - row_span.start), block, column_span)
            if piece is not None:
                yield piece


def _by_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`(B, Sq, Hq)` as `(B, Hkv, Hq / Hkv, Sq)`."""
    return rows.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1)


def _logits(q: torch.Tensor, k: torch.Tensor, band: Band, scores: Scores) -> torch.Tensor:
    """Scores of shape `(B, Hkv, Hq / Hkv, Sq, Sk)`, -inf where not admitted."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(wide)) * scores.scale
    if scores.softcap:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    return logits.masked_fill(~admitted(band, q.shape[1], k.shape[1], q.device), -torch.inf)


def _weights(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """`exp(logits - lse)`, 0 where a row admits nothing."""
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0, torch.exp(logits - lse.unsqueeze(-1)))
