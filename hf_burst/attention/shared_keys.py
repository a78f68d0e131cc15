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
        before (`bool`): Whether all of them are real and stand before every query.
        expand (callable, *optional*): Makes keys and values of every head of some of these, which are latent.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    before: bool = False
    expand: Expand | None = None

    def blocks(self, size: int) -> "Iterator[Keys]":
        """These keys, so many at a time, expanded."""
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
        nothing = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=wide)
        parts = [torch.cat([q.new_zeros(*q.shape[:3], value_dim, dtype=wide), nothing], -1)]
    own = merged(torch.stack(parts)) if len(parts) > 1 else parts[0]
    with group.messages():
        outs, lses = gather_stacked(own, group).split([value_dim, 1], -1)
    # a token's attention takes half a millisecond, so that each kernel less counts: log-sum-exps are not merged
    weights = _weights(lses, None if sinks is None else sinks.to(wide)[None, None, :, None, None])
    out = (outs * weights).sum(0)
    return out.to(q.dtype).transpose(1, 2).contiguous()


def merged(parts: Tensor) -> Tensor:
    """Partial attentions merged in their order (arXiv 2403.09347, equations 5 to 7).

    Args:
        parts (`torch.Tensor` of shape `(parts, ..., value_dim + 1)`): The outputs, and behind each its log-sum-exp. A
            part without a visible key has -inf there, and weighs nothing.
    """
    if len(parts) == 1:
        return parts[0]
    out, lse = parts[..., :-1], parts[..., -1:]
    return torch.cat([(out * _weights(lse)).sum(0), lse.logsumexp(0)], -1)


def _weights(lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """What each part counts, by its log-sum-exp; the scores of sinks count as one part more, whose value is 0."""
    every = lses if sinks is None else torch.cat([lses, sinks.expand_as(lses[:1])])
    return every.softmax(0)[: len(lses)].masked_fill(lses == -torch.inf, 0)


def _partial(q: Tensor, positions: Tensor, held: Keys, pattern: MaskPattern, scores: Scores) -> Iterator[Tensor]:
    """Partial attentions over some keys, each of shape `(batch, heads, n, value_dim + 1)`."""
    if not held.keys.shape[2]:
        return
    rows = held.keys.shape[0]
    copies = q.shape[0] // rows  # of the batch, which share a row of keys
    fits = _BLOCK_SCORES // (q.shape[0] * q.shape[1] * q.shape[2])
    for block in held.blocks(held.keys.shape[2] if held.expand is None else max(1, fits)):
        heads = block.keys.shape[1]
        folded = q.unflatten(0, (rows, copies)).unflatten(2, (heads, -1)).transpose(1, 2)  # r, kv heads, copies, ...
        sees_all = held.before and pattern.window is None and pattern.attention_chunk_size is None
        kernel = _fast(folded, block, scores) if sees_all else None
        if kernel is not None:
            yield _restored(kernel, folded)
            continue
        for small in block.blocks(max(1, fits)):
            visible = None if sees_all else _visible(positions, small.positions, pattern, rows)
            yield _restored(_by_products(folded, small, visible, scores), folded)


def _restored(partial: Tensor, folded: Tensor) -> Tensor:
    """Rows of queries `(rows, kv heads, copies * group * n, ...)` as `(batch, heads, n, ...)`."""
    rows, heads, copies, group, length, _ = folded.shape
    whole = partial.unflatten(2, (copies, group, length)).transpose(1, 2)
    return whole.reshape(rows * copies, heads * group, length, -1)


def _fast(folded: Tensor, held: Keys, scores: Scores) -> Tensor | None:
    """Attention over keys that all queries see, by a flash kernel; `None` where none can."""
    sizes, kind = (folded.shape[-1], held.values.shape[-1]), folded.device.type
    kernel = _kernel(KernelRequest(kind, folded.dtype, *sizes, softcap=scores.softcap > 0))
    if kernel is None:
        return None
    q = folded.flatten(2, 4).transpose(1, 2)
    out, lse = kernel.forward(q, held.keys.transpose(1, 2), held.values.transpose(1, 2), Band(), scores)
    wide = accumulation_dtype(folded.dtype)
    return torch.cat([out.to(wide), lse.to(wide)[..., None]], -1).transpose(1, 2)


@lru_cache(maxsize=64)
def _kernel(request: KernelRequest) -> Kernel | None:
    """The kernel that splits few queries by keys; `None` where it cannot compute such an attention."""
    try:
        return select_kernel(_KERNELS[request.device], request)
    except KernelError:
        return None


def _by_products(folded: Tensor, held: Keys, visible: Tensor | None, scores: Scores) -> Tensor:
    """Attention by two matrix products and a log-sum-exp, with any mask."""
    wide = accumulation_dtype(folded.dtype)
    logits = folded.flatten(2, 4).to(wide) @ held.keys.to(wide).mT * scores.scale
    if scores.softcap:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if visible is not None:
        shaped = logits.unflatten(2, folded.shape[2:5])  # (rows, kv heads, copies, group, n, keys)
        logits = shaped.masked_fill(~visible[:, None, :, None], -torch.inf).flatten(2, 4)
    lse = logits.logsumexp(-1, keepdim=True)
    weights = torch.where(lse == -torch.inf, 0, torch.exp(logits - lse))
    return torch.cat([weights @ held.values.to(wide), lse], -1)


def _visible(queries: Tensor, keys: Tensor, pattern: MaskPattern, rows: int) -> Tensor:
    """Which queries see which keys, by their positions: `torch.BoolTensor` of shape `(rows, copies, n, keys)`."""
    row, column = queries.unflatten(0, (rows, -1))[..., None], keys[:, None, None]
    seen = (column >= 0) & (column <= row)
    if pattern.window is not None:
        seen &= row - column <= pattern.window
    if pattern.attention_chunk_size is not None:
        seen &= row // pattern.attention_chunk_size == column // pattern.attention_chunk_size
    return seen
