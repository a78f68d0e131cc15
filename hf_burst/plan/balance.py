"""Balance: which rank owns which chunk, so that all ranks have as many tokens and as much of the mask to compute, in
all and in each round of a ring, after which they wait for each other.

One long document under a causal mask is balanced by zigzag. Of packed documents the long ones cost most, wherever they
lie; their chunks have to be dealt out. The coarsest cut that is even enough is taken: fewer chunks are fewer and larger
kernel calls, and fewer documents that reach from one rank to another.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heapreplace
from itertools import cycle, pairwise
from typing import get_args

from ..config import Chunking
from ..errors import ConfigError
from .mask import Mask
from .sharding import cut, pattern
from .work import meetings, pairs_at

_EVEN = 0.02  # by how much the busiest rank may be above the mean where a finer cut would do better
_EVEN_ROUNDS = 0.15  # the same, of the rounds one after the other
_FINER = (4, 8, 16)  # chunks of a rank
_SMALLEST = 512  # tokens of such a chunk: kernel calls stay large
_SWAPS = 64
_TRIED = 2**15  # numbers that swaps for the sake of the rounds are judged by, a square of the ranks each
_TOKENS_OF_A_TRY = 256  # one at most for so many, so that it takes a small part of a step


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
            that leaves the busiest rank at most 2 % above the mean, and the rounds of a ring one after the other at
            most 15 %; the most even one if none does.
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
    best, least = contiguous, _unevenness(masks, contiguous, weights)
    coarse = 2 * stretches
    for each in range(coarse, chunks_per_rank(length, ranks, chunking, stretches) + 1):
        if least <= (_EVEN, _EVEN_ROUNDS):
            break
        if each == coarse or _cuts(each, stretches):
            owners = zigzag
            if each > coarse:
                owners = _dealt_out(_work(masks, weights, each * ranks), ranks, stretches)
                if stretches == 1:  # what is dealt out for stretches has to be as even in each of them
                    owners = _evened(masks, weights, owners)
            found = _unevenness(masks, owners, weights)
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


def waiting(masks: Sequence[Mask], owners: Sequence[int], weights: Sequence[int] = ()) -> float:
    """How much longer than the mean work of a rank the rounds of a ring take, one after the other and each as long as
    its busiest rank: 0.1 is 10 %. Where documents meet in too many chunks to go through, the [`imbalance`].

    Args:
        masks, owners, weights: As in [`imbalance`].
    """
    rounds = _Rounds.of(masks, owners, weights)
    if rounds is None:
        return imbalance(masks, owners, weights)
    return rounds.longest * rounds.ranks / sum(rounds.loads) - 1


def _unevenness(masks: Sequence[Mask], owners: Sequence[int], weights: Sequence[int]) -> tuple[float, float]:
    """Imbalance, as far as it is one, and then that of the rounds: the smaller the better."""
    return max(imbalance(masks, owners, weights), _EVEN), waiting(masks, owners, weights)


class _Rounds:
    """What each rank computes in each round of a ring, in which the keys of the rank so far before it visit; kept up as
    chunks change hands.

    Args:
        work (sequence of `int`): Pairs whose query lies in each chunk.
        met (`dict[tuple[int, int], int]`): Those whose key lies in another chunk, by the chunks of query and key.
        owners (sequence of `int`): The rank that holds each chunk.
    """

    def __init__(self, work: Sequence[int], met: dict[tuple[int, int], int], owners: Sequence[int]) -> None:
        self.ranks = max(owners) + 1
        self.owners = list(owners)
        self.own = list(work)
        self.others: list[list[tuple[int, int, bool]]] = [[] for _ in work]  # chunk, pairs, whether it has the keys
        self.pairs = [[0] * self.ranks for _ in range(self.ranks)]  # by round and rank
        self.loads = [0] * self.ranks
        for (queries, keys), pairs in met.items():
            self.own[queries] -= pairs
            self.others[queries].append((keys, pairs, True))
            self.others[keys].append((queries, pairs, False))
            self.pairs[(owners[queries] - owners[keys]) % self.ranks][owners[queries]] += pairs
        for owner, own, all_of_it in zip(owners, self.own, work, strict=True):
            self.pairs[0][owner] += own
            self.loads[owner] += all_of_it

    @classmethod
    def of(cls, masks: Sequence[Mask], owners: Sequence[int], weights: Sequence[int]) -> "_Rounds | None":
        """Those of equal chunks; `None` if there is too much to go through."""
        met: dict[tuple[int, int], int] = {}
        bounds = _bounds(masks[0].length, len(owners))
        for mask, weight in zip(masks, weights or [1] * len(masks), strict=True):
            found = meetings(mask, bounds)
            if found is None:
                return None
            for both, pairs in found.items():
                met[both] = met.get(both, 0) + weight * pairs
        return cls(_work(masks, weights, len(owners)), met, owners)

    @property
    def longest(self) -> int:
        """The pairs of the busiest rank of each round, together."""
        return sum(map(max, self.pairs))

    def give(self, chunk: int, rank: int) -> None:
        """Makes a chunk that of another rank."""
        before, self.owners[chunk] = self.owners[chunk], rank
        moved = self.own[chunk]
        self.pairs[0][before] -= moved
        self.pairs[0][rank] += moved
        for other, pairs, keys in self.others[chunk]:
            there = self.owners[other]
            if keys:
                moved += pairs
                self.pairs[(before - there) % self.ranks][before] -= pairs
                self.pairs[(rank - there) % self.ranks][rank] += pairs
            else:
                self.pairs[(there - before) % self.ranks][there] -= pairs
                self.pairs[(there - rank) % self.ranks][there] += pairs
        self.loads[before] -= moved
        self.loads[rank] += moved


def _evened(masks: Sequence[Mask], weights: Sequence[int], owners: tuple[int, ...]) -> tuple[int, ...]:
    """Swaps chunks for as long as that makes the rounds of a ring shorter and no rank busier than it may be."""
    rounds = _Rounds.of(masks, owners, weights)
    if rounds is None:
        return owners
    allowed = max(*rounds.loads, (1 + _EVEN) * sum(rounds.loads) / rounds.ranks)
    longest, left, since = rounds.longest, min(_TRIED // rounds.ranks**2, masks[0].length // _TOKENS_OF_A_TRY), 0
    swaps = [(one, other) for one in range(len(owners)) for other in range(one)]
    for one, other in cycle(swaps):
        if since == len(swaps) or left == 0:
            break
        since += 1
        mine, theirs = rounds.owners[one], rounds.owners[other]
        if mine == theirs:
            continue
        left -= 1
        rounds.give(one, theirs)
        rounds.give(other, mine)
        if rounds.longest < longest and max(rounds.loads) <= allowed:
            longest, since = rounds.longest, 0
        else:
            rounds.give(other, theirs)
            rounds.give(one, mine)
    return tuple(rounds.owners)


def _bounds(length: int, chunks: int) -> tuple[int, ...]:
    """Those of equal chunks, the last of which may be shorter, or empty."""
    size = -(-length // chunks)
    return tuple(min(index * size, length) for index in range(chunks + 1))


def _work(masks: Sequence[Mask], weights: Sequence[int], chunks: int) -> list[int]:
    """The pairs whose query lies in each of as many equal chunks."""
    bounds = _bounds(masks[0].length, chunks)
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
