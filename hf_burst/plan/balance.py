"""Balance: which rank owns which chunk, so that all ranks have as many tokens and as much of the mask to compute.

One long document under a causal mask is balanced by zigzag. Of packed documents the long ones cost most, wherever they
lie; their chunks have to be dealt out. The coarsest cut that is even enough is taken: fewer chunks are fewer and larger
kernel calls, and fewer documents that reach from one rank to another.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heapreplace
from itertools import pairwise
from typing import get_args

from ..config import Chunking
from ..errors import ConfigError
from .mask import Mask
from .sharding import cut, pattern
from .work import pairs_at

_EVEN = 0.02  # by how much the busiest rank may be above the mean where a finer cut would do better
_FINER = (4, 8, 16)  # chunks of a rank
_SMALLEST = 512  # tokens of such a chunk: kernel calls stay large
_SWAPS = 64


@lru_cache(maxsize=256)
def assign(
    masks: tuple[Mask, ...],
    ranks: int,
    chunking: Chunking = "balanced",
    weights: tuple[int, ...] = (),
    stretches: int = 1,
) -> tuple[int, ...]:
    """The owner of each of the equal chunks into which a batch is cut.

    Args:
        masks (`tuple[Mask, ...]`): Those of the rows of the batch, of one length; several of a row if layers differ.
        ranks (`int`): Ranks of the group.
        chunking (`str`, defaults to `"balanced"`): `"contiguous"` (P chunks), `"zigzag"` (2P chunks, rank r holds r and
            2P-1-r), or `"balanced"`: the first of these two, or of 4, 8 and 16 chunks a rank dealt out by their work,
            that leaves the busiest rank at most 2 % above the mean; the most even one if none does.
        weights (`tuple[int, ...]`, *optional*): How often each mask is computed; once by default.
        stretches (`int`, defaults to 1): Into how many equal parts the sequence is cut before each of them is cut and
            dealt out by itself, so that the ranks have as much of every one.

    Returns:
        `tuple[int, ...]`: As many chunks for every rank, in every stretch. The last one is padded if the length is no
        multiple.

    Raises:
        ConfigError: If there is no such chunking.
        ShardingError: If there are more chunks than tokens, or no ranks.
    """
    if chunking not in get_args(Chunking):
        raise ConfigError(f"There is no chunking {chunking!r}; it must be one of {', '.join(get_args(Chunking))}.")
    length = masks[0].length
    contiguous, zigzag = (pattern(ranks, way) * stretches for way in ("contiguous", "zigzag"))
    owners = zigzag if chunking == "zigzag" else contiguous
    cut(length, owners)  # raises if there are too few tokens
    if chunking != "balanced" or ranks == 1:
        return owners
    best, least = contiguous, imbalance(masks, contiguous, weights)
    coarse = 2 * stretches
    for each in range(coarse, chunks_per_rank(length, ranks, chunking, stretches) + 1):
        if least <= _EVEN:
            break
        if each == coarse or _cuts(each, stretches):
            owners = zigzag if each == coarse else _dealt_out(_work(masks, weights, each * ranks), ranks, stretches)
            found = imbalance(masks, owners, weights)
            if found < least:
                best, least = owners, found
    return best


def chunks_per_rank(length: int, ranks: int, chunking: Chunking, stretches: int = 1) -> int:
    """Into how many chunks a rank's tokens are cut at most: sequences are padded to a multiple of so many for all
    ranks, so that their length does not depend on how documents are packed."""
    if ranks == 1 or chunking == "contiguous":
        return stretches
    coarse = 2 * stretches
    if chunking == "zigzag":
        return coarse
    finer = [each for each in _FINER if _cuts(each, stretches) and length >= each * ranks * _SMALLEST]
    return max(finer, default=coarse if length >= coarse * ranks else stretches)


def _cuts(each: int, stretches: int) -> bool:
    """Whether so many chunks a rank are dealt out in so many stretches."""
    return each in _FINER and each > 2 * stretches and each % stretches == 0


def imbalance(masks: Sequence[Mask], owners: Sequence[int], weights: Sequence[int] = ()) -> float:
    """By how much the pairs of the rank with the most are above the mean: 0.02 is 2 %.

    Args:
        masks (`tuple[Mask, ...]`): Those of the rows of a batch.
        owners (sequence of `int`): The owner of each of as many equal chunks.
        weights (sequence of `int`, *optional*): How often each mask is computed; once by default.
    """
    loads = [0] * (max(owners) + 1)
    for owner, work in zip(owners, _work(masks, weights, len(owners)), strict=True):
        loads[owner] += work
    return max(loads) * len(loads) / sum(loads) - 1


def _work(masks: Sequence[Mask], weights: Sequence[int], chunks: int) -> list[int]:
    """The pairs whose query lies in each of as many equal chunks."""
    length = masks[0].length
    size = -(-length // chunks)
    bounds = [min(index * size, length) for index in range(chunks + 1)]
    work = [0] * chunks
    for mask, weight in zip(masks, weights or [1] * len(masks), strict=True):
        before = pairs_at(mask, bounds)
        work = [so_far + weight * (stop - start) for so_far, (start, stop) in zip(work, pairwise(before), strict=True)]
    return work


def _dealt_out(work: Sequence[int], ranks: int, stretches: int) -> tuple[int, ...]:
    """The chunks of every stretch dealt out."""
    size = len(work) // stretches
    return tuple(owner for start in range(0, len(work), size) for owner in _dealt(work[start : start + size], ranks))


def _dealt(work: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Deals chunks out to ranks, equally many to each: the largest first, to the rank with the least so far; then
    swaps chunks between the ranks with the most and the least for as long as that helps."""
    each = len(work) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    open_hands = [(0, rank) for rank in range(ranks)]  # a heap: the one with the least work first
    for chunk in sorted(range(len(work)), key=lambda chunk: (-work[chunk], chunk)):
        load, rank = open_hands[0]
        hands[rank].append(chunk)
        loads[rank] = load + work[chunk]
        if len(hands[rank]) < each:
            heapreplace(open_hands, (loads[rank], rank))
        else:
            heappop(open_hands)
    for _ in range(_SWAPS):
        most, least = loads.index(max(loads)), loads.index(min(loads))
        swap = _best_swap([work[chunk] for chunk in hands[most]], [work[chunk] for chunk in hands[least]])
        if swap is None:
            break
        give, take = swap
        moved = work[hands[most][give]] - work[hands[least][take]]
        hands[most][give], hands[least][take] = hands[least][take], hands[most][give]
        loads[most], loads[least] = loads[most] - moved, loads[least] + moved
    owners = [0] * len(work)
    for rank, chunks in enumerate(hands):
        for chunk in chunks:
            owners[chunk] = rank
    return tuple(owners)


def _best_swap(more: Sequence[int], less: Sequence[int]) -> tuple[int, int] | None:
    """Which chunk of the rank with more goes for which of the other, so that they end nearest to each other."""
    gap = sum(more) - sum(less)
    order = sorted(range(len(less)), key=less.__getitem__)
    sizes = [less[index] for index in order]
    best, rest = None, gap
    for give, size in enumerate(more):
        place = bisect_left(sizes, size - gap / 2)
        for near in (place - 1, place):
            if 0 <= near < len(sizes) and abs(gap - 2 * (size - sizes[near])) < rest:
                best, rest = (give, order[near]), abs(gap - 2 * (size - sizes[near]))
    return best
