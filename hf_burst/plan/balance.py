"""Balance: which rank owns which chunk, so that all ranks hold as many tokens and compute as many pairs.

Zigzag balances one long document under a causal mask. Long documents of a packed batch cost most, wherever they lie, so
their chunks are dealt out. The coarsest cut that is even enough is taken: its kernel calls are fewer and larger.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from ..config import Chunking
from ..errors import ConfigError
from .mask import Mask
from .sharding import cut, pattern
from .work import meetings, pairs_of_chunks

_EVEN = 0.02  # how far the busiest rank may be above the mean before a finer cut is tried
_EVEN_STEPS = 0.15  # the same of the steps of a ring, one after the other
_MOST_STEPS = 8  # ranks of a ring whose steps count: more ranks exchange heads inside of hosts, and have other steps
_FINER = (4, 8, 16)  # chunks of a rank that are dealt out
_SMALLEST = 512  # tokens of such a chunk: kernel calls stay large
_SWAPS = 64  # between the ranks with the most and the least work
_TRIED = 2**15  # numbers read to judge swaps for even steps; a swap reads the square of the ranks
_TOKENS_OF_A_TRY = 256  # a swap is tried for so many tokens at most, so that planning is a small part of a step


@lru_cache(maxsize=256)
def assign(
    masks: tuple[Mask, ...],
    ranks: int,
    chunking: Chunking = "balanced",
    weights: tuple[int, ...] = (),
    stretches: int = 1,
) -> tuple[int, ...]:
    """The owner of each equal chunk of a batch: as many for every rank, in every part of the sequence.

    Args:
        masks (`tuple[Mask, ...]`): Masks of one length of the rows of the batch; several of a row if layers differ.
        ranks (`int`): Ranks of the group.
        chunking (`str`, defaults to `"balanced"`): As in [`BurstConfig`]. `"balanced"` tries `"contiguous"`,
            `"zigzag"`, and 4, 8 and 16 chunks a rank dealt out by their work, in this order. Steps of a ring count over
            up to 8 ranks, unless documents lie in too many chunks to go through. Not `"documents"`, whose chunks are
            not equal, see [`sharding_for`].
        weights (`tuple[int, ...]`, *optional*): How often each mask is computed; once by default.
        stretches (`int`, defaults to 1): Equal parts of the sequence, each of which is cut and dealt out by itself.

    Raises:
        ConfigError: If there is no such chunking.
        ShardingError: If there are more chunks than tokens, or no ranks.
    """
    if chunking not in ("contiguous", "zigzag", "balanced"):
        raise ConfigError(f"{chunking!r} deals out no equal chunks; take 'contiguous', 'zigzag' or 'balanced'.")
    length = masks[0].length
    contiguous, zigzag = (pattern(ranks, way) * stretches for way in ("contiguous", "zigzag"))
    owners = zigzag if chunking == "zigzag" else contiguous
    cut(length, owners)  # raises if there are too few tokens
    if chunking != "balanced" or ranks == 1:
        return owners
    best, least = _unevenness(masks, weights, _work(masks, weights, len(contiguous)), contiguous)
    for count in _finer_cuts(length, ranks, stretches):
        if least[0] <= _EVEN and (least[1] <= _EVEN_STEPS or least[1] == math.inf):
            break
        dealt = count > 2 * stretches
        work = _work(masks, weights, count * ranks)
        owners = _dealt_out(work, ranks, stretches) if dealt else zigzag
        # chunks of parts stay where they are: each part has to be as even
        owners, unevenness = _unevenness(masks, weights, work, owners, swaps=dealt and stretches == 1)
        if unevenness < least:
            best = owners
            least = unevenness
    return best


def chunks_per_rank(length: int, ranks: int, chunking: Chunking, stretches: int = 1) -> int:
    """Into how many chunks a rank's tokens are cut at most. Sequences are padded to a multiple of that for all ranks,
    so that their length does not depend on how documents are packed."""
    if ranks == 1 or chunking in ("contiguous", "documents"):
        return stretches
    return 2 * stretches if chunking == "zigzag" else max(_finer_cuts(length, ranks, stretches), default=stretches)


def _finer_cuts(length: int, ranks: int, stretches: int) -> list[int]:
    """Chunks of a rank in the cuts after the contiguous one: zigzag, then those that are dealt out."""
    dealt = [n for n in _FINER if n > 2 * stretches and n % stretches == 0 and length >= n * ranks * _SMALLEST]
    return [2 * stretches, *dealt] if length >= 2 * stretches * ranks else []


def imbalance(
    masks: Sequence[Mask], owners: Sequence[int], weights: Sequence[int] = (), boundaries: Sequence[int] = ()
) -> float:
    """By how much the pairs of the rank with the most are above the mean (0.02 is 2 %), for these owners of as many
    chunks, equal ones without `boundaries`; `masks` and `weights` as in [`assign`]."""
    return _above_mean(pairs_of_chunks(masks, boundaries or _bounds(masks[0].length, len(owners)), weights), owners)


def _above_mean(work: Sequence[int], owners: Sequence[int]) -> float:
    loads = [0] * (max(owners) + 1)
    for owner, pairs in zip(owners, work, strict=True):
        loads[owner] += pairs
    return max(loads) * len(loads) / sum(loads) - 1


def _unevenness(
    masks: Sequence[Mask], weights: Sequence[int], work: Sequence[int], owners: tuple[int, ...], swaps: bool = False
) -> tuple[tuple[int, ...], tuple[float, float]]:
    """Owners, possibly after swaps for even steps, with their imbalance (at least 2 %, below which it does not count)
    and that of the steps (infinite where it is not known)."""
    of_steps = math.inf
    if max(owners) < _MOST_STEPS:
        met = meetings(masks, _bounds(masks[0].length, len(owners)), weights)
        if met is not None:
            steps = _Steps(work, met, owners)
            if swaps:
                steps.even_out(masks[0].length // _TOKENS_OF_A_TRY)
            owners = tuple(steps.owners)
            of_steps = steps.imbalance
    return owners, (max(_above_mean(work, owners), _EVEN), of_steps)


class _Steps:
    """What each rank computes in each step of a ring when K and V travel, kept up as chunks change hands."""

    def __init__(self, work: Sequence[int], met: dict[tuple[int, int], int], owners: Sequence[int]) -> None:
        self.ranks = max(owners) + 1
        self.owners = list(owners)
        self.pairs = [[0] * self.ranks for _ in range(self.ranks)]  # by step and rank
        self.met: list[list[tuple[int, int, int]]] = [[] for _ in work]  # by chunk: of queries, of keys, pairs
        inside = {(chunk, chunk): pairs for chunk, pairs in enumerate(work)}
        for (queries, _), pairs in met.items():
            inside[queries, queries] -= pairs
        found = [(*chunks, pairs) for chunks, pairs in (inside | met).items()]
        for entry in found:
            for chunk in set(entry[:2]):
                self.met[chunk].append(entry)
        self._count(found, 1)

    @property
    def loads(self) -> list[int]:
        """The pairs of each rank."""
        return [sum(own) for own in zip(*self.pairs, strict=True)]

    @property
    def longest(self) -> int:
        """The pairs of the busiest rank of each step, together."""
        return sum(map(max, self.pairs))

    @property
    def imbalance(self) -> float:
        """How far `longest` is above the mean work of a rank."""
        return self.longest * self.ranks / sum(self.loads) - 1

    def _count(self, found: Sequence[tuple[int, int, int]], sign: int) -> None:
        for queries, keys, pairs in found:
            rank = self.owners[queries]
            self.pairs[(rank - self.owners[keys]) % self.ranks][rank] += sign * pairs

    def give(self, chunk: int, rank: int) -> None:
        """Makes a chunk that of another rank."""
        self._count(self.met[chunk], -1)
        self.owners[chunk] = rank
        self._count(self.met[chunk], 1)

    def even_out(self, tries: int) -> None:
        """Swaps chunks while that makes the steps shorter and no rank busier than it may be, in at most `tries`."""
        allowed = max(*self.loads, (1 + _EVEN) * sum(self.loads) / self.ranks)
        left, before, longest = min(_TRIED // self.ranks**2, tries), 0, self.longest
        pairs = [(first, second) for first in range(len(self.owners)) for second in range(first)]
        while longest != before:
            before = longest
            for first, second in pairs:
                one = self.owners[first]
                other = self.owners[second]
                if one == other:
                    continue
                if left == 0:
                    return
                left -= 1
                self.give(first, other)
                self.give(second, one)
                if self.longest < longest and max(self.loads) <= allowed:
                    longest = self.longest
                else:
                    self.give(second, other)
                    self.give(first, one)


def _bounds(length: int, chunks: int) -> tuple[int, ...]:
    """Those of equal chunks, the last of which may be shorter, or empty."""
    size = -(-length // chunks)
    return tuple(min(index * size, length) for index in range(chunks + 1))


def _work(masks: Sequence[Mask], weights: Sequence[int], chunks: int) -> list[int]:
    return pairs_of_chunks(masks, _bounds(masks[0].length, chunks), weights)


def _dealt_out(work: Sequence[int], ranks: int, stretches: int) -> tuple[int, ...]:
    """The chunks of every part of the sequence dealt out."""
    size = len(work) // stretches
    return tuple(owner for start in range(0, len(work), size) for owner in _dealt(work[start : start + size], ranks))


def _dealt(work: Sequence[int], ranks: int) -> list[int]:
    """Deals chunks out, equally many to each rank: the largest first, to the rank with the least so far. Then the ranks
    with the most and the least swap chunks while that helps."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    open_hands = [(0, rank) for rank in range(ranks)]  # a heap: the one with the least work first
    for chunk in sorted(range(len(work)), key=lambda chunk: -work[chunk]):
        _, rank = heappop(open_hands)
        hands[rank].append(chunk)
        loads[rank] += work[chunk]
        if len(hands[rank]) < len(work) // ranks:
            heappush(open_hands, (loads[rank], rank))
    for _ in range(_SWAPS):
        most = loads.index(max(loads))
        least = loads.index(min(loads))
        swap = _best_swap([work[chunk] for chunk in hands[most]], [work[chunk] for chunk in hands[least]])
        if swap is None:
            break
        give, take = swap
        moved = work[hands[most][give]] - work[hands[least][take]]
        hands[most][give], hands[least][take] = hands[least][take], hands[most][give]
        loads[most] -= moved
        loads[least] += moved
    owners = [0] * len(work)
    for rank, chunks in enumerate(hands):
        for chunk in chunks:
            owners[chunk] = rank
    return owners


def _best_swap(more: Sequence[int], less: Sequence[int]) -> tuple[int, int] | None:
    """The chunk of the rank with more and that of the other whose swap leaves them nearest to each other; `None` if no
    swap brings them nearer."""
    gap = sum(more) - sum(less)
    order = sorted(range(len(less)), key=less.__getitem__)
    sizes = [less[index] for index in order]
    best = None
    rest = gap
    for give, size in enumerate(more):
        above = bisect_left(sizes, size - gap / 2)
        for near in (above - 1, above):
            if 0 <= near < len(sizes) and abs(gap - 2 * (size - sizes[near])) < rest:
                best = (give, order[near])
                rest = abs(gap - 2 * (size - sizes[near]))
    return best
