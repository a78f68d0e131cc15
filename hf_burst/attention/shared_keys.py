"""Attention of a few new tokens, whose queries every rank has, over keys that lie on the ranks of a group.

A rank computes its partial attention, over the keys that it holds. One exchange brings all partial attentions to all
ranks, which merge them in rank order: they hold equal bits (LeanAttention, arXiv 2405.10480; Helix, arXiv 2507.07120).
Rows of a batch that share keys are folded into the rows of one product, which reads the keys once (RelayAttention,
arXiv 2402.14808), as are the query heads of a group.
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

_BLOCK_SCORES = 1 << 26  # the most that are in memory at once
_NOTHING = -1e30  # the log-sum-exp of a row that sees no key: beside any other it weighs nothing, and is no NaN alone
_KERNELS: dict[str, KernelName] = {"cuda": "torch_flash", "cpu": "cpu_flash"}  # which split few queries by keys

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Keys:
    """Keys and values that this rank holds.

    Args:
        keys (`torch.Tensor` of shape `(rows, heads, n, head_dim)`): The keys; `rows` divides that of the queries, and
            queries that follow each other share a row.
        values (`torch.Tensor` of shape `(rows, heads, n, value_dim)`): The values.
        positions (`torch.LongTensor` of shape `(rows or 1, n)`): Their positions in the sequence; -1 for padding.
        before (`bool`): Whether all of them are real, and none stands behind a query.
        expand (callable, *optional*): Makes keys and values of every head of some of these, which are latent.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    before: bool = False
    expand: Expand | None = None

    def blocks(self, size: int) -> "Iterator[Keys]":
        """These keys, so many at a time, expanded."""
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
) -> Tensor:
    """Attention over all keys that the ranks hold. Every rank calls it with the same queries.

    Args:
        q (`torch.Tensor` of shape `(batch, heads, n, head_dim)`): The queries of new tokens.
        positions (`torch.LongTensor` of shape `(batch, n)`): Their positions; -1 for padding, which sees nothing.
        held (sequence of [`Keys`]): What this rank holds, each key once.
        pattern ([`MaskPattern`]): How far queries see.
        scores ([`Scores`]): Scale and soft-capping.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): A further score of every row, whose value is 0.
        group ([`ContextGroup`]): The ranks.
        value_dim (`int`): The head size of values.

    Returns:
        `torch.Tensor` of shape `(batch, n, heads, value_dim)` in the dtype of q, the same bits on every rank.
    """
    wide = accumulation_dtype(q.dtype)
    parts = [part for keys in held for part in _partial(q, positions, keys, pattern, scores)]
    if not parts:
        nothing = q.new_full((*q.shape[:3], 1), _NOTHING, dtype=wide)
        parts = [torch.cat([q.new_zeros(*q.shape[:3], value_dim, dtype=wide), nothing], -1)]
    if group.size > 1:
        own = merged(torch.stack(parts)) if len(parts) > 1 else parts[0]
        with group.messages():
            every = gather_stacked(own, group)
    else:
        every = torch.stack(parts)
    outs, lses = every.split([value_dim, 1], -1)
    if sinks is not None:
        added = sinks.to(wide)[None, None, :, None, None].expand_as(lses[:1])
        weights = torch.cat([lses, added]).softmax(0)[: len(lses)]
    else:
        weights = lses.softmax(0)
    return (outs * weights).sum(0).to(q.dtype).transpose(1, 2).contiguous()


def merged(parts: Tensor) -> Tensor:
    """Partial attentions merged in their order (arXiv 2403.09347, equations 5 to 7).

    A new token's attention takes half a millisecond, so that each operation less counts, here and below.

    Args:
        parts (`torch.Tensor` of shape `(parts, ..., value_dim + 1)`): The outputs, and behind each its log-sum-exp. A
            row without a visible key has zeros and `_NOTHING`.
    """
    out, lse = parts[..., :-1], parts[..., -1:]
    return torch.cat([(out * lse.softmax(0)).sum(0), lse.logsumexp(0)], -1)


def _partial(q: Tensor, positions: Tensor, held: Keys, pattern: MaskPattern, scores: Scores) -> Iterator[Tensor]:
    """Partial attentions over some keys, each of shape `(batch, heads, n, value_dim + 1)`."""
    if not held.keys.shape[2]:
        return
    rows = held.keys.shape[0]
    copies = q.shape[0] // rows  # of the batch, which share a row of keys
    fits = max(1, _BLOCK_SCORES // (q.shape[0] * q.shape[1] * q.shape[2]))
    for block in held.blocks(held.keys.shape[2] if held.expand is None else fits):
        folded = _folded(q, rows, block.keys.shape[1])
        sees_all = held.before and pattern.window is None and pattern.attention_chunk_size is None
        kernel = _fast(folded, block, scores) if sees_all else None
        if kernel is not None:
            yield _restored(kernel, q)
            continue
        for small in block.blocks(fits):
            visible = None if sees_all else _visible(positions, small.positions, pattern, rows)
            yield _restored(_by_products(folded, small, visible, scores, copies, q.shape[2]), q)


def _folded(q: Tensor, rows: int, heads: int) -> Tensor:
    """Queries `(batch, heads, n, head_dim)` as rows of the keys that they share: `(rows, key heads, copies * group * n,
    head_dim)`."""
    batch, every, length, size = q.shape
    if batch == rows:
        return q.reshape(rows, heads, every // heads * length, size)
    copies = q.reshape(rows, batch // rows, heads, every // heads * length, size)
    return copies.transpose(1, 2).reshape(rows, heads, -1, size)


def _restored(partial: Tensor, q: Tensor) -> Tensor:
    """The other way round: `(batch, heads, n, ...)`."""
    rows, heads, _, size = partial.shape
    batch, every, length, _ = q.shape
    if batch == rows:
        return partial.reshape(batch, every, length, size)
    copies = partial.reshape(rows, heads, batch // rows, every // heads * length, size)
    return copies.transpose(1, 2).reshape(batch, every, length, size)


def _fast(folded: Tensor, held: Keys, scores: Scores) -> Tensor | None:
    """Attention over keys that all queries see, by a flash kernel; `None` where none can."""
    sizes, kind = (folded.shape[-1], held.values.shape[-1]), folded.device.type
    kernel = _kernel(KernelRequest(kind, folded.dtype, *sizes, softcap=scores.softcap > 0))
    if kernel is None:
        return None
    tensors = (folded.transpose(1, 2), held.keys.transpose(1, 2), held.values.transpose(1, 2))
    out, lse = kernel.forward(*tensors, Band(), scores)
    wide = accumulation_dtype(folded.dtype)  # on every rank, also under autocast
    return torch.cat([out.to(wide), lse.to(wide)[..., None]], -1).transpose(1, 2)


@lru_cache(maxsize=64)
def _kernel(request: KernelRequest) -> Kernel | None:
    """The kernel that splits few queries by keys; `None` where it cannot compute such an attention."""
    try:
        return select_kernel(_KERNELS[request.device], request)
    except KernelError:
        return None


def _by_products(
    folded: Tensor, held: Keys, visible: Tensor | None, scores: Scores, copies: int, length: int
) -> Tensor:
    """Attention of queries `(rows, key heads, copies * group * n, head_dim)` by two matrix products and a log-sum-exp,
    with any mask."""
    wide = accumulation_dtype(folded.dtype)
    with torch.autocast(folded.device.type, enabled=False):  # sums are wide, on every rank
        logits = folded.to(wide) @ held.keys.to(wide).mT * scores.scale
        if scores.softcap:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        if visible is not None:
            shaped = logits.unflatten(2, (copies, -1, length))  # (rows, key heads, copies, group, n, keys)
            logits = shaped.masked_fill(~visible[:, None, :, None], -torch.inf).flatten(2, 4)
        lse = logits.logsumexp(-1, keepdim=True).clamp(min=_NOTHING)
        return torch.cat([torch.exp(logits - lse) @ held.values.to(wide), lse], -1)


def _visible(queries: Tensor, keys: Tensor, pattern: MaskPattern, rows: int) -> Tensor:
    """Which queries see which keys, by their positions: `torch.BoolTensor` of shape `(rows, copies, n, keys)`."""
    row, column = queries.unflatten(0, (rows, -1))[..., None], keys[:, None, None]
    seen = (column >= 0) & (column <= row)
    if pattern.window is not None:
        seen &= row - column <= pattern.window
    if pattern.attention_chunk_size is not None:
        seen &= row // pattern.attention_chunk_size == column // pattern.attention_chunk_size
    return seen
