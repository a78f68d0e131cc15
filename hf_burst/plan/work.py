"""What a layer makes the ranks compute, on any machine: pairs counted in closed form, and the schedule of the rank that
has the most."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..config import Schedule
from .mask import Mask
from .sharding import Sharding
from .steps import Plan, Rotating, Transfer, goes_ahead, make_plan
from .tiles import Tile
from .traffic import Pass, Shapes

_BLOCK = 128  # rows and columns that flash kernels compute at a time
_MEETINGS = 8192  # of chunks: more are not gone through
_DOCUMENT = 5  # blocks that a further document takes as long as: 10,000 of 100 tokens on an H200
_PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass(frozen=True)
class Layer:
    """One attention layer and the batch that it is given.

    Args:
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        sharding ([`Sharding`]): Which rank of the group holds what.
        shapes ([`Shapes`]): Heads and bytes.
    """

    masks: tuple[Mask, ...]
    sharding: Sharding
    shapes: Shapes

    @property
    def ranks(self) -> int:
        """Those of the group."""
        return self.sharding.ranks

    def plan(self, ulysses: int) -> Plan:
        """The plan of the ring when `ulysses` ranks exchange heads for tokens and are one place of it."""
        return make_plan(self.masks, self.sharding.joined(ulysses))


@dataclass(frozen=True)
class KernelWork:
    """One kernel call, summed over the batch.

    Args:
        pairs (`int`): Admitted pairs.
        q_rows (`int`): Rows of queries.
        k_rows (`int`): Rows of keys.
        computed (`int`): The pairs that a GPU's kernel computes, or could in that time: of documents all in the blocks
            that it computes whole.
    """

    pairs: int
    q_rows: int
    k_rows: int
    computed: int


@dataclass(frozen=True)
class StepWork:
    """A step of a schedule, in numbers.

    Args:
        calls (`tuple[KernelWork, ...]`): The kernel calls of its tiles.
        send (`Transfer`, *optional*): As in [`Step`].
        recv (`Transfer`, *optional*): As in [`Step`].
        ahead (`bool`): Whether the visitors of the next step go before the gradients of this one, in a backward pass.
    """

    calls: tuple[KernelWork, ...]
    send: Transfer | None
    recv: Transfer | None
    ahead: bool


@dataclass(frozen=True)
class Load:
    """What the slowest rank computes under a route, whatever the machine.

    Args:
        ranks (`int`): Ranks of the group.
        places (`int`): Places of the ring.
        batch (`int`): Rows of the batch.
        rows (`int`): Tokens of a place, all rows of the batch together.
        shapes ([`Shapes`]): Heads of the layer.
        sequence (`int`): Tokens of all places, all rows of the batch together.
        rings (`dict[str, tuple[StepWork, ...]]`): The schedule of each pass; none if keys are gathered.
        lags (`dict[str, float]`): [`lag`] of each of them.
        gathered (`tuple[KernelWork, ...]`): The kernel calls if keys are gathered.
        fetched (`int`): Rows of keys that it then fetches, all rows of the batch together.
        given (`int`): Rows of its own that others then fetch.
    """

    ranks: int
    places: int
    batch: int
    rows: int
    shapes: Shapes
    sequence: int
    rings: dict[Pass, tuple[StepWork, ...]]
    lags: dict[Pass, float]
    gathered: tuple[KernelWork, ...]
    fetched: int
    given: int


def band_pairs(rows: int, columns: int, low: int | None, high: int | None) -> int:
    """How many pairs of a block have `low <= row - column <= high`; `None` is no bound."""

    def triangle(side: int) -> int:
        return side * (side + 1) // 2 if side > 0 else 0

    def at_least(distance: int) -> int:
        side = rows - distance
        return triangle(side) - triangle(side - rows) - triangle(side - columns) + triangle(side - rows - columns)

    admitted = rows * columns if low is None else at_least(low)
    return admitted if high is None else admitted - at_least(high + 1)


def tile_pairs(tile: Tile) -> int:
    """How many pairs a tile admits in one row of the batch."""
    if not tile.segments:
        return band_pairs(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], tile.low, tile.high)
    sizes = [stop - start for start, stop in pairwise(tile.segments)]
    if tile.high is None and tile.low == 0:
        return sum(size * (size + 1) for size in sizes) // 2
    return sum(band_pairs(size, size, tile.low, tile.high) for size in sizes)


def pairs_at(mask: Mask, tokens: Iterable[int], keys: bool = False) -> list[int]:
    """How many pairs have their query (or their key) before each of some tokens."""
    totals, distances, found = _cumulative_pairs(mask), mask.distances, []
    for token in tokens:
        index = bisect_right(mask.documents, token) - 1
        start, pairs = mask.documents[index], totals[index]
        if token > start:
            size = mask.documents[index + 1] - start
            rows, columns = (size, token - start) if keys else (token - start, size)
            pairs += band_pairs(rows, columns, *distances)
        found.append(pairs)
    return found


@lru_cache(maxsize=64)
def meetings(
    masks: tuple[Mask, ...], boundaries: tuple[int, ...], weights: tuple[int, ...]
) -> dict[tuple[int, int], int] | None:
    """The pairs of a query in one chunk and a key in another one, by both chunks, of all masks as often as their
    weights say; `None` if there are too many chunks that may meet to go through."""
    spans = [
        (mask, weight, *span) for mask, weight in zip(masks, weights, strict=True) for span in _spans(mask, boundaries)
    ]
    if sum((last - first) * (last - first + 1) for *_, first, last in spans) > 2 * _MEETINGS:
        return None
    found: dict[tuple[int, int], int] = {}
    for mask, weight, start, stop, first, last in spans:
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
                    found[i, j] = found.get((i, j), 0) + pairs
    return found


def _spans(mask: Mask, boundaries: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """The documents that lie in several chunks: where they start and stop, the first and the last of the chunks."""
    found: list[tuple[int, int, int, int]] = []
    for boundary in boundaries[1:-1]:
        at = bisect_right(mask.documents, boundary) - 1
        if boundary == mask.documents[at] or (found and found[-1][0] == mask.documents[at]):
            continue
        start, stop = mask.documents[at : at + 2]
        found.append((start, stop, bisect_right(boundaries, start) - 1, bisect_right(boundaries, stop - 1) - 1))
    return found


def pairs_by_round(
    own: Sequence[int], met: dict[tuple[int, int], int], owners: Sequence[int], ranks: int, rotating: Rotating
) -> list[list[int]]:
    """What each rank computes in each round of a ring, in which the rank so far before it visits: by round and rank.

    Args:
        own (sequence of `int`): The pairs of queries of each chunk with keys of the same one.
        met (`dict[tuple[int, int], int]`): Those with keys of other chunks, see [`meetings`].
        owners (sequence of `int`): The rank that holds each chunk.
        ranks (`int`): Ranks of the ring.
        rotating (`str`): What travels.
    """
    rounds = [[0] * ranks for _ in range(ranks)]
    for owner, pairs in zip(owners, own, strict=True):
        rounds[0][owner] += pairs
    for (queries, keys), pairs in met.items():
        host, guest = (queries, keys) if rotating == "kv" else (keys, queries)
        rounds[(owners[host] - owners[guest]) % ranks][owners[host]] += pairs
    return rounds


@lru_cache(maxsize=256)
def lag(plan: Plan, rotating: Rotating) -> float:
    """How much longer the rounds of a ring take one after the other, each as long as the rank that computes the most in
    it, than the rank that computes the most in all of them together: 0.5 is half as long again. 0 where that is too
    much to count."""
    sharding, masks = plan.sharding, plan.masks
    met = meetings(masks, sharding.boundaries, (1,) * len(masks)) if sharding.ranks > 1 else None
    if met is None:
        return 0.0
    own = [0] * len(sharding.owners)
    for mask in masks:
        before = pairs_at(mask, sharding.boundaries)
        own = [so_far + last - first for so_far, (first, last) in zip(own, pairwise(before), strict=True)]
    for (queries, _), pairs in met.items():
        own[queries] -= pairs
    rounds = pairs_by_round(own, met, sharding.owners, sharding.ranks, rotating)
    return sum(map(max, rounds)) / max(map(sum, zip(*rounds, strict=True))) - 1


@lru_cache(maxsize=256)
def pairs_of_ranks(plan: Plan, keys: bool = False) -> tuple[int, ...]:
    """How many pairs have their query (or their key) on each of the ranks."""
    sharding = plan.sharding
    pairs = [0] * sharding.ranks
    for mask in plan.masks:
        before = pairs_at(mask, sharding.boundaries, keys)
        for owner, (first, last) in zip(sharding.owners, pairwise(before), strict=True):
            pairs[owner] += last - first
    return tuple(pairs)


def busiest(plan: Plan, rotating: Rotating) -> int:
    """The rank that computes the most when K and V, or queries, visit; the first of equals."""
    pairs = pairs_of_ranks(plan, keys=rotating == "q")
    return pairs.index(max(pairs))


@lru_cache(maxsize=256)
def rounds(plan: Plan, rank: int, rotating: Rotating) -> tuple[StepWork, ...]:
    """The schedule of a rank with what its kernel calls compute."""
    steps = plan.steps(rank, rotating)
    ahead = [goes_ahead(step, following, True) for step, following in pairwise(steps)]
    return tuple(
        StepWork(tuple(map(_call, step.tiles)), step.send, step.recv, early)
        for step, early in zip(steps, [*ahead, True], strict=True)
    )


@lru_cache(maxsize=256)
def gathered_calls(plan: Plan, rank: int) -> tuple[tuple[KernelWork, ...], int, int]:
    """What a rank computes with gathered keys, how many rows of keys it fetches for that from the others, and how many
    of its own they fetch."""
    others = [other for other in range(plan.sharding.ranks) if other != rank]
    fetched = sum(_looked_at(plan, rank, other) for other in others)
    given = sum(_looked_at(plan, other, rank) for other in others)
    return tuple(map(_call, plan.gathered(rank))), fetched, given


def rotating_of(route: Schedule, direction: Pass) -> Rotating:
    """What travels round the ring of a route."""
    return "q" if route.ring == "burst" and direction == "backward" else "kv"


def load_of(route: Schedule, layer: Layer) -> Load:
    """What the rank with the most to compute does under a route."""
    plan = layer.plan(route.ulysses)
    batch, places = len(plan.masks), plan.sharding.ranks
    rings: dict[Pass, tuple[StepWork, ...]] = {}
    lags: dict[Pass, float] = {}
    gathered: tuple[KernelWork, ...] = ()
    fetched = given = 0
    if route.ring == "all_gather" and places > 1:
        gathered, fetched, given = gathered_calls(plan, busiest(plan, "kv"))
    else:
        for direction in _PASSES:
            rotating = rotating_of(route, direction)
            rings[direction] = rounds(plan, busiest(plan, rotating), rotating)
            lags[direction] = lag(plan, rotating)
    return Load(
        ranks=layer.ranks,
        places=places,
        batch=batch,
        rows=batch * plan.sharding.most_tokens,
        shapes=layer.shapes,
        sequence=batch * plan.sharding.length,
        rings=rings,
        lags=lags,
        gathered=gathered,
        fetched=batch * fetched,
        given=batch * given,
    )


def _looked_at(plan: Plan, looking: int, home: int) -> int:
    """How many keys of `home` lie between the first and the last that the queries of `looking` see (as
    [`Plan.reach`], without its tiles: the later a query, the later its keys)."""
    runs = plan.sharding.runs(looking)
    start = min(mask.keys(runs[0].start)[0] for mask in plan.masks)
    stop = max(mask.keys(runs[-1].stop - 1)[1] for mask in plan.masks)
    return sum(max(0, min(run.stop, stop) - max(run.start, start)) for run in plan.sharding.runs(home))


def _call(tile: Tile) -> KernelWork:
    batch = tile.batch[1] - tile.batch[0]
    rows, columns = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    return KernelWork(batch * tile_pairs(tile), batch * rows, batch * columns, batch * _computed(tile))


def _computed(tile: Tile) -> int:
    """The pairs of a tile, of documents those in whole blocks and some for each document."""
    if not tile.segments:
        return tile_pairs(tile)
    total = 0
    for start, stop in pairwise(tile.segments):
        blocks = -(-(stop - start) // _BLOCK)
        squares = blocks * blocks if tile.low is None else blocks * (blocks + 1) // 2
        if tile.high is not None:
            squares = min(squares, blocks * (tile.high // _BLOCK + 2))
        total += (squares + _DOCUMENT) * _BLOCK * _BLOCK
    return total


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
