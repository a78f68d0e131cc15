"""Merging partial attentions by their log-sum-exp, in the accumulation dtype."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges a partial attention into another one, in place (BurstAttention, arXiv 2403.09347, equations 5 to 7).

    A row that admits nothing has `out = 0` and `lse = -inf`, in either part or in both; it weighs nothing.

    Args:
        out (`torch.Tensor` of shape `(B, S, H, D)`): Merged so far, fp32 or fp64; changed.
        lse (`torch.Tensor` of shape `(B, S, H)`): Its log-sum-exp, of the same dtype; changed.
        part (`torch.Tensor` of shape `(B, S, H, D)`): What comes in addition, of any dtype.
        part_lse (`torch.Tensor` of shape `(B, S, H)`): Its log-sum-exp.
    """
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_(_weight(lse, total)).addcmul_(part.to(out.dtype), _weight(part_lse, total))
    lse.copy_(total)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0, torch.exp(lse - total)).unsqueeze(-1)
