"""Attention written out: every pair tested against the definition of the mask, one softmax, torch's own autograd."""

from collections.abc import Sequence

import torch


def admitted_pairs(length: int, causal: bool, window: int | None, documents: Sequence[int]) -> list[list[bool]]:
    """Whether query i sees key j, for all i and j, straight from the definition of [`hf_burst.plan.Mask`]."""
    document = [index for index, end in enumerate(documents[1:]) for _ in range(documents[index], end)]

    def sees(query: int, key: int) -> bool:
        if document[query] != document[key] or (causal and key > query):
            return False
        return window is None or abs(query - key) <= window

    return [[sees(query, key) for key in range(length)] for query in range(length)]


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, admitted: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the dtype of its inputs, with every score in memory.

    Args:
        q (`torch.Tensor` of shape `(B, Sq, Hq, D)`): Queries.
        k, v (`torch.Tensor` of shape `(B, Sk, Hkv, ...)`): Keys and values.
        admitted (`torch.BoolTensor` of shape `(B or 1, Sq, Sk)`): Who sees whom.
        scale (`float`): Factor of the scores.

    Returns:
        `out` of shape `(B, Sq, Hq, Dv)` and `lse` of shape `(B, Sq, Hq)`; 0 and -inf for a row that sees nothing.
    """
    share = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(share, 2)) * scale
    blind = ~admitted.any(-1)
    scores = scores.masked_fill(~(admitted | blind[..., None])[:, None], -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(share, 2))
    lse = scores.logsumexp(-1).transpose(1, 2)
    return out.masked_fill(blind[..., None, None], 0), lse.masked_fill(blind[..., None], -torch.inf)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
