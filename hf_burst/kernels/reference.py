"""The oracle: attention in plain torch, in fp32 or fp64, with every score of a tile in memory."""

import torch

from .base import Band, Card


class ReferenceKernel:
    """Plain torch. Slow and large, right by inspection; the only one for head sizes that nothing else takes."""

    card = Card(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        head_dims=(1, 1 << 16),
        head_multiple=1,
        own_value_dim=True,
        wide=True,
        wants_out=False,
    )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`Kernel.forward`]."""
        scores = _scores(q, k, band, scale)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.to(weights.dtype)).flatten(2, 3)
        return out, lse.permute(0, 3, 1, 2).flatten(2)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor,
        band: Band,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See [`Kernel.backward`]; FlashAttention (arXiv 2205.14135), appendix B.2."""
        heads = k.shape[2]
        scores = _scores(q, k, band, scale)
        weights = _weights(scores, _by_head(lse, heads).to(scores.dtype))
        wide_dout = dout.to(scores.dtype).unflatten(2, (heads, -1))
        wide_q, wide_k, wide_v = q.to(scores.dtype).unflatten(2, (heads, -1)), k.to(scores.dtype), v.to(scores.dtype)
        dv = torch.einsum("bhgqk,bqhgd->bkhd", weights, wide_dout)
        dweights = torch.einsum("bqhgd,bkhd->bhgqk", wide_dout, wide_v)
        dscores = weights * (dweights - _by_head(delta, heads).to(scores.dtype).unsqueeze(-1)) * scale
        dq = torch.einsum("bhgqk,bkhd->bqhgd", dscores, wide_k).flatten(2, 3)
        dk = torch.einsum("bhgqk,bqhgd->bkhd", dscores, wide_q)
        return dq, dk, dv


def admitted(band: Band, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The mask of a tile: `torch.BoolTensor` of shape `(rows, columns)`, `True` where a row sees a column."""
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if band.low is not None:
        mask &= row - column >= band.low
    if band.high is not None:
        mask &= row - column <= band.high
    if band.segments:
        ends = torch.tensor(band.segments[1:], device=device)
        mask &= torch.bucketize(row, ends, right=True) == torch.bucketize(column, ends, right=True)
    return mask


def _by_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`(B, Sq, Hq)` as `(B, Hkv, Hq / Hkv, Sq)`."""
    return rows.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, band: Band, scale: float) -> torch.Tensor:
    """Scaled scores of shape `(B, Hkv, Hq / Hkv, Sq, Sk)`, -inf where not admitted."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(wide)) * scale
    return scores.masked_fill(~admitted(band, q.shape[1], k.shape[1], q.device), -torch.inf)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """`exp(scores - lse)`, 0 where a row admits nothing."""
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0, torch.exp(scores - lse.unsqueeze(-1)))
