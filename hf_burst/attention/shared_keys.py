"""Attention of a few new tokens over keys spread over the ranks of a group. Every rank has all the queries.

Each rank computes partial attention over its own keys. One exchange brings all partial results to all ranks, which
merge them in rank order to bitwise equal results (LeanAttention, arXiv 2405.10480; Helix, arXiv 2507.07120). Batch rows
that share keys, and query heads of one group, are folded into the rows of one product, which reads the keys once
(RelayAttention, arXiv 2402.14808).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..config import KernelName
from ..errors import KernelError
from ..kernels import Kernel, KernelRequest, Scores, select_kernel
from ..numerics import accumulation_dtype
from ..plan import Band, MaskPattern
from ..ranks.collectives import gather_stacked
from ..ranks.group import ContextGroup

_BLOCK_SCORES = 1 << 26  # most scores in memory at once
_NOTHING = -1e30  # log-sum-exp of a row that sees no key: no weight beside other parts, and no NaN by itself
_KERNELS: dict[str, KernelName] = {"cuda": "torch_flash", "cpu": "cpu_flash"}  # they split keys if queries are few

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Exchange = Callable[[Tensor, ContextGroup], Tensor]


def exchanged(own: Tensor, group: ContextGroup) -> Tensor:
    """Gathers the partial attentions of all ranks, stacked in rank order."""
    with group.messages():
        return gather_stacked(own, group)


@dataclass(frozen=True)
class Keys:
    """Keys and values that this rank holds. Consecutive rows of queries share a row of keys."""

    keys: Tensor  # `(rows, heads, n, head_dim)`; `rows` divides that of the queries
    values: Tensor  # `(rows, heads, n, value_dim)`
    positions: Tensor  # in the sequence, `(rows or 1, n)`; -1 for padding
    before: bool = False  # whether none is padding, and none comes after a query
    expand: Expand | None = None  # expands latent keys and values to those of every head

    def blocks(self, size: int) -> "Iterator[Keys]":
        """Yields expanded blocks of at most `size` keys."""
        if self.expand is None and self.keys.shape[2] <= size:
            yield self
            return
        for start in range(0, self.keys.shape[2], size):
            part = slice(start, start + size)
            keys, values = self.keys[:, :, part], self.values[:, :, part]
            keys, values = (keys, values) if self.expand is None else self.expand(keys, values)
            yield Keys(keys, values, self.positions[:, part], self.before)


def attend_to_shared(
    q: Tensor,
    positions: Tensor,
    held: Sequence[Keys],
    pattern: MaskPattern,
    scores: Scores,
    sinks: Tensor | None,
    group: ContextGroup,
    value_dim: int,
    exchange: Exchange = exchanged,
) -> Tensor:
    """Computes attention over the keys of all ranks. Every rank calls it with the same queries.

    Args:
        q (`torch.Tensor` of shape `(batch, heads, n, head_dim)`): The queries of new tokens.
        positions (`torch.LongTensor` of shape `(batch, n)`): Their positions; -1 for padding, which sees nothing.
        held (sequence of [`Keys`]): This rank's keys, each once: equally many entries on every rank, which may be
            empty.
        pattern ([`MaskPattern`]): How far queries see.
        scores ([`Scores`]): Scale and soft-capping.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): An additional score of every row, with value 0.
        group ([`ContextGroup`]): The ranks.
        value_dim (`int`): The head size of values.
        exchange (callable, *optional*): Gathers the partial attentions of all ranks.

    Returns:
        `torch.Tensor` of shape `(batch, n, heads, value_dim)` in the dtype of q, bitwise equal on every rank.
    """
    wide = accumulation_dtype(q.dtype)
    # each part's output, followed by its log-sum-exp
    own = q.new_empty(len(held), *q.shape[:3], value_dim + 1, dtype=wide)
    for part, keys in zip(own, held, strict=True):
        _attend(part, q, positions, keys, pattern, scores)
    if group.size > 1:
        if len(own) > 1 and q.shape[2] > 1:  # sends less; for one token, fewer operations are faster
            own = torch.cat(_merged(own[..., :-1], own[..., -1:]), -1)[None]
        own = exchange(own, group).flatten(0, 1)
    outs, lses = own[..., :-1], own[..., -1:]
    if sinks is not None:
        added = sinks.to(wide)[None, None, :, None, None].expand_as(lses[:1])
        weights = torch.cat([lses, added]).softmax(0)[: len(lses)]
    else:
        weights = lses.softmax(0)
    return (outs * weights).sum(0).to(q.dtype).transpose(1, 2).contiguous()


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial attentions `(parts, ..., value_dim)` and their log-sum-exp `(parts, ..., 1)`, in order (arXiv
    2403.09347, equations 5 to 7)."""
    return (outs * lses.softmax(0)).sum(0), lses.logsumexp(0)


def _attend(part: Tensor, q: Tensor, positions: Tensor, held: Keys, pattern: MaskPattern, scores: Scores) -> None:
    """Writes the attention over some keys into `part`, `(batch, heads, n, value_dim + 1)`. Rows that see no key get
    zeros and `_NOTHING`."""
    found = list(_attentions(q, positions, held, pattern, scores))
    if not found:
        part.zero_()
        part[..., -1] = _NOTHING
        return
    own, own_lse = found[0]
    if len(found) > 1:
        outs, lses = map(torch.stack, zip(*found, strict=True))
        own, wide_lse = _merged(outs, lses[..., None])
        own_lse = wide_lse[..., 0]
    rows, heads = own_lse.shape[:2]
    unfolded = part.view(rows, len(q) // rows, heads, -1, part.shape[-1]).transpose(1, 2)
    out, lse = unfolded[..., :-1], unfolded[..., -1]
    out.copy_(own.view(out.shape))
    lse.copy_(own_lse.view(lse.shape))


def _attentions(
    q: Tensor, positions: Tensor, held: Keys, pattern: MaskPattern, scores: Scores
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields outputs `(rows, key heads, copies * group * n, value_dim)` and their log-sum-exp, block by block."""
    batch, heads, length, _ = q.shape
    rows, _, kept, _ = held.keys.shape
    if not kept:
        return
    fits = max(1, _BLOCK_SCORES // (batch * heads * length))
    sees_all = held.before and pattern.window is None and pattern.attention_chunk_size is None
    for block in held.blocks(kept if held.expand is None else fits):
        folded = _folded(q, rows, block.keys.shape[1])
        fast = _fast(folded, block, scores) if sees_all else None
        if fast is not None:
            yield fast
            continue
        for small in block.blocks(fits):
            visible = None if sees_all else _visible(positions, small.positions, pattern, rows)
            yield _by_products(folded, small, visible, scores, batch // rows, length)


def _folded(q: Tensor, rows: int, heads: int) -> Tensor:
    """Folds queries `(batch, heads, n, head_dim)` into the rows of the keys they share: `(rows, key heads, copies *
    group * n, head_dim)`."""
    batch, _, _, size = q.shape
    return q.reshape(rows, batch // rows, heads, -1, size).transpose(1, 2).reshape(rows, heads, -1, size)


def _fast(folded: Tensor, held: Keys, scores: Scores) -> tuple[Tensor, Tensor] | None:
    """Computes attention over keys that all queries see with a flash kernel, or returns `None` if none supports it."""
    sizes, kind = (folded.shape[-1], held.values.shape[-1]), folded.device.type
    kernel = _kernel(KernelRequest(kind, folded.dtype, *sizes, softcap=scores.softcap > 0))
    if kernel is None:
        return None
    tensors = (folded.transpose(1, 2), held.keys.transpose(1, 2), held.values.transpose(1, 2))
    out, lse = kernel.forward(*tensors, Band(), scores)
    return out.transpose(1, 2), lse.transpose(1, 2)


@lru_cache(maxsize=64)
def _kernel(request: KernelRequest) -> Kernel | None:
    """Returns the kernel that splits keys if queries are few, or `None` if it does not support the request."""
    try:
        return select_kernel(_KERNELS[request.device], request)
    except KernelError:
        return None


def _by_products(
    folded: Tensor, held: Keys, visible: Tensor | None, scores: Scores, copies: int, length: int
) -> tuple[Tensor, Tensor]:
    """Computes attention of queries `(rows, key heads, copies * group * n, head_dim)` with any mask, by two matrix
    products and a log-sum-exp."""
    wide = accumulation_dtype(folded.dtype)
    with torch.autocast(folded.device.type, enabled=False):  # keeps sums in fp32 or fp64
        logits = folded.to(wide) @ held.keys.to(wide).mT * scores.scale
        if scores.softcap:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        if visible is not None:
            shaped = logits.unflatten(2, (copies, -1, length))  # (rows, key heads, copies, group, n, keys)
            logits = shaped.masked_fill(~visible[:, None, :, None], -torch.inf).flatten(2, 4)
        lse = logits.logsumexp(-1, keepdim=True).clamp(min=_NOTHING)
        return torch.exp(logits - lse) @ held.values.to(wide), lse[..., 0]


def _visible(queries: Tensor, keys: Tensor, pattern: MaskPattern, rows: int) -> Tensor:
    """Returns which queries see which keys by position: `torch.BoolTensor` of shape `(rows, copies, n, keys)`."""
    row, column = queries.unflatten(0, (rows, -1))[..., None], keys[:, None, None]
    seen = (column >= 0) & (column <= row)
    if pattern.window is not None:
        seen &= row - column <= pattern.window
    if pattern.attention_chunk_size is not None:
        seen &= row // pattern.attention_chunk_size == column // pattern.attention_chunk_size
    return seen
