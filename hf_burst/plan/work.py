"""What a layer makes the ranks compute, on any machine: pairs counted in closed form, by rank and by step of a ring."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..config import Schedule
from .mask import Mask, band_pairs
from .sharding import Sharding
from .steps import Plan, Rotating, make_plan
from .tiles import Tile
from .traffic import Pass, Shapes

_MOST_MEETINGS = 8192  # pairs of chunks in one document; more are not gone through


@dataclass(frozen=True)
class Layer:
    """One attention layer and the batch that it is given.

    Args:
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        sharding ([`Sharding`]): Which rank of the group holds which queries, keys and values.
        shapes ([`Shapes`]): Heads and bytes.
    """

    masks: tuple[Mask, ...]
    sharding: Sharding
    shapes: Shapes

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.sharding.ranks

    def plan(self, ulysses: int, hosts: int = 1) -> Plan:
        """The plan of the ring in which `ulysses` neighbouring ranks, which exchange heads, are one ring rank; on two
        levels over several hosts."""
        return make_plan(self.masks, self.sharding.joined(ulysses), hosts=hosts)


def tile_pairs(tile: Tile) -> int:
    """How many pairs a tile admits in one row of the batch."""
    if not tile.segments:
        return band_pairs(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], tile.low, tile.high)
    sizes = [stop - start for start, stop in pairwise(tile.segments)]
    if tile.high is None and tile.low == 0:
        return sum(size * (size + 1) for size in sizes) // 2
    return sum(band_pairs(size, size, tile.low, tile.high) for size in sizes)


def _pairs_before(mask: Mask, tokens: Iterable[int], keys: bool) -> list[int]:
    """How many pairs have their query (or their key) before each of some tokens."""
    totals, distances, counts = _cumulative_pairs(mask), mask.distances, []
    for token in tokens:
        index = bisect_right(mask.documents, token) - 1
        start, pairs = mask.documents[index], totals[index]
        if token > start:
            size = mask.documents[index + 1] - start
            rows, columns = (size, token - start) if keys else (token - start, size)
            pairs += band_pairs(rows, columns, *distances)
        counts.append(pairs)
    return counts


def pairs_of_chunks(
    masks: Sequence[Mask], boundaries: Sequence[int], weights: Sequence[int] = (), keys: bool = False
) -> list[int]:
    """How many pairs have their query (or with `keys` their key) in each chunk between two boundaries. Each mask is
    computed once, or as often as its weight says."""
    totals = [0] * (len(boundaries) - 1)
    for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True):
        for chunk, (start, stop) in enumerate(pairwise(_pairs_before(mask, boundaries, keys))):
            totals[chunk] += weight * (stop - start)
    return totals


@lru_cache(maxsize=64)
def meetings(
    masks: tuple[Mask, ...], boundaries: tuple[int, ...], weights: tuple[int, ...] = ()
) -> dict[tuple[int, int], int] | None:
    """The weighted pairs of a query in one chunk and a key in another one, by both chunks; `None` if too many chunks
    may meet to go through them."""
    documents = [
        (mask, weight, *span)
        for mask, weight in zip(masks, weights or (1,) * len(masks), strict=True)
        for span in _spans(mask, boundaries)
    ]
    if sum((last - first) * (last - first + 1) for *_, first, last in documents) > 2 * _MOST_MEETINGS:
        return None
    met: dict[tuple[int, int], int] = {}
    for mask, weight, start, stop, first, last in documents:
        low, high = mask.distances
        parts = [(max(start, boundaries[at]), min(stop, boundaries[at + 1])) for at in range(first, last + 1)]
        for i, (row, row_end) in enumerate(parts, first):
            for j, (column, column_end) in enumerate(parts[: i - first] if low == 0 else parts, first):
                if i == j:
                    continue
                ahead = row - column
                bounds = (None if low is None else low - ahead, None if high is None else high - ahead)
                pairs = weight * band_pairs(row_end - row, column_end - column, *bounds)
                if pairs:
                    met[i, j] = met.get((i, j), 0) + pairs
    return met


def _spans(mask: Mask, boundaries: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The documents that lie in several chunks: where they start and stop, the first and the last of the chunks."""
    spans: list[tuple[int, int, int, int]] = []
    for boundary in boundaries[1:-1]:
        at = bisect_right(mask.documents, boundary) - 1
        if boundary == mask.documents[at] or (spans and spans[-1][0] == mask.documents[at]):
            continue
        start, stop = mask.documents[at : at + 2]
        spans.append((start, stop, bisect_right(boundaries, start) - 1, bisect_right(boundaries, stop - 1) - 1))
    return spans


def pairs_by_step(
    work: Sequence[int],
    met: dict[tuple[int, int], int],
    owners: Sequence[int],
    ranks: int,
    rotating: Rotating,
    hosts: int = 1,
) -> list[list[int]]:
    """The pairs that each rank computes in each step of a ring, by step and rank, from the pairs of each chunk's
    queries (`work`), those of them that [`meetings`] finds (`met`) and the owners of the chunks. On two levels the
    steps of the inner rings follow each other."""
    steps, per_host = [[0] * ranks for _ in range(ranks)], ranks // hosts
    for owner, pairs in zip(owners, work, strict=True):
        steps[0][owner] += pairs
    for (queries, keys), pairs in met.items():
        host, guest = (queries, keys) if rotating == "kv" else (keys, queries)
        steps[0][owners[queries]] -= pairs
        crossing = (owners[host] // per_host - owners[guest] // per_host) % hosts
        steps[crossing * per_host + (owners[host] - owners[guest]) % per_host][owners[host]] += pairs
    return steps


@lru_cache(maxsize=256)
def lag(plan: Plan, rotating: Rotating) -> float:
    """How much longer the steps of a ring take than its busiest rank computes, if every step waits for the rank that
    computes the most in it: 0.5 is half as long again. It is 0 where there is too much to count."""
    boundaries, owners = plan.queries.boundaries, plan.queries.owners
    met = meetings(plan.masks, boundaries) if plan.ranks > 1 else None
    if met is None:
        return 0.0
    steps = pairs_by_step(pairs_of_chunks(plan.masks, boundaries), met, owners, plan.ranks, rotating, plan.hosts)
    return sum(map(max, steps)) / max(map(sum, zip(*steps, strict=True))) - 1


@lru_cache(maxsize=256)
def pairs_of_ranks(plan: Plan, keys: bool = False) -> tuple[int, ...]:
    """How many pairs have their query (or their key) on each of the ranks."""
    totals, sharding = [0] * plan.ranks, plan.keys if keys else plan.queries
    for owner, pairs in zip(sharding.owners, pairs_of_chunks(plan.masks, sharding.boundaries, keys=keys), strict=True):
        totals[owner] += pairs
    return tuple(totals)


def busiest(plan: Plan, rotating: Rotating) -> int:
    """The rank that computes the most when K and V, or queries, travel; the first of equals."""
    pairs = pairs_of_ranks(plan, keys=rotating == "q")
    return pairs.index(max(pairs))


def gathered_rows(plan: Plan, rank: int) -> tuple[int, int]:
    """The rows of keys that a rank fetches from the others where keys are gathered, and those of its own they fetch."""

    def rows(looking: int, home: int) -> int:
        """Keys of `home` between the first and the last that queries of `looking` see, as [`Plan.key_span`] has it."""
        runs = plan.queries.runs(looking)
        start = min(mask.keys(runs[0].start)[0] for mask in plan.masks)
        stop = max(mask.keys(runs[-1].stop - 1)[1] for mask in plan.masks)
        return sum(max(0, min(run.stop, stop) - max(run.start, start)) for run in plan.keys.runs(home))

    others = [other for other in range(plan.ranks) if other != rank]
    return sum(rows(rank, other) for other in others), sum(rows(other, rank) for other in others)


def rotating_of(schedule: Schedule, direction: Pass) -> Rotating:
    """What travels round the ring of a schedule."""
    return "q" if schedule.ring == "burst" and direction == "backward" else "kv"


@lru_cache(maxsize=64)
def _cumulative_pairs(mask: Mask) -> tuple[int, ...]:
    """The pairs of all documents that end at each of the mask's boundaries, or before."""
    total, totals = 0, [0]
    low, high = mask.distances
    causal = mask.length if high is None else high + 1  # up to so many tokens a document is a triangle
    for start, stop in pairwise(mask.documents):
        size = stop - start
        total += size * (size + 1) // 2 if low == 0 and size <= causal else band_pairs(size, size, low, high)
        totals.append(total)
    return tuple(totals)
