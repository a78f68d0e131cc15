"""Attention written out: every pair tested against the definition of the mask, one softmax, torch's own autograd."""

from collections.abc import Sequence

import torch


def admitted_pairs(
    length: int, causal: bool, window: int | None, documents: Sequence[int], chunk: int | None = None
) -> list[list[bool]]:
    """Whether query i sees key j, for all i and j, straight from the definition of [`hf_burst.plan.Mask`]; chunks are
    counted from the start of each document."""
    document = [index for index, end in enumerate(documents[1:]) for _ in range(documents[index], end)]

    def sees(query: int, key: int) -> bool:
        if document[query] != document[key] or (causal and key > query):
            return False
        start = documents[document[query]]
        if chunk is not None and (query - start) // chunk != (key - start) // chunk:
            return False
        return window is None or abs(query - key) <= window

    return [[sees(query, key) for key in range(length)] for query in range(length)]


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    admitted: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the dtype of its inputs, with every score in memory.

    Args:
        q (`torch.Tensor` of shape `(B, Sq, Hq, D)`): Queries.
        k, v (`torch.Tensor` of shape `(B, Sk, Hkv, ...)`): Keys and values.
        admitted (`torch.BoolTensor` of shape `(B or 1, Sq, Sk)`): Who sees whom.
        scale (`float`): Factor of the scores.
        softcap (`float`): Where scores saturate; 0 is nowhere.
        sinks (`torch.Tensor` of shape `(Hq,)`, *optional*): One more score of every row, of value 0.

    Returns:
        `out` of shape `(B, Sq, Hq, Dv)` and `lse` of shape `(B, Sq, Hq)`; 0 and -inf for a row that sees nothing.
    """
    share = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(share, 2)) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if sinks is not None:
        scores = scores.masked_fill(~admitted[:, None], -torch.inf)
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v.repeat_interleave(share, 2))
        return out, scores.logsumexp(-1).transpose(1, 2)
    fully_masked = ~admitted.any(-1)
    scores = scores.masked_fill(~(admitted | fully_masked[..., None])[:, None], -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(share, 2))
    lse = scores.logsumexp(-1).transpose(1, 2)
    return out.masked_fill(fully_masked[..., None, None], 0), lse.masked_fill(fully_masked[..., None], -torch.inf)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
