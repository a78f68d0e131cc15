"""Steps: for every rank of a ring, the list that computes a mask once, forward or backward.

In step s the block of rank r is used by rank (r + s) mod P. It travels straight from its home, cut to the rows that the
mask needs there. Either K and V rotate (`"kv"`), or the queries with all that belongs to them (`"q"`). In the backward
pass the gradients of the rotating block return to its home in the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ..errors import ShardingError
from .mask import Mask
from .sharding import Sharding
from .tiles import Tile, gathered_tiles, tiles_between

Rotating = Literal["kv", "q"]


@dataclass(frozen=True)
class Transfer:
    """Rows `[start, stop)` of a shard that travel to or from `peer`. If one tile covers exactly these rows (`lone`), a
    gradient returns as the kernel made it; several tiles are first summed in the accumulation dtype."""

    peer: int
    start: int
    stop: int
    lone: bool

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """One step of a rank.

    Args:
        order (`int`): When it comes; both ends of a transfer have the same number. Step 0 uses the rank's own block.
        source (`int`): The rank whose block is used.
        tiles (`tuple[Tile, ...]`): What this rank computes with it.
        send (`Transfer`, *optional*): The rows of this rank that another one uses in this step.
        recv (`Transfer`, *optional*): The rows of `source` that this rank uses.
    """

    order: int
    source: int
    tiles: tuple[Tile, ...]
    send: Transfer | None = None
    recv: Transfer | None = None


def goes_ahead(step: Step, following: Step, returning: bool) -> bool:
    """Whether the blocks of the following step are sent before `step` computes, or after its gradients.

    Blocks of order s + 1 go before the gradients of order s, and these before the blocks of any larger order. All ranks
    keep this sequence whatever steps they leave out: NCCL would wait for ever if two ends of a message differed.
    Gradients are `returning` in the backward pass.
    """
    return not returning or step.order == 0 or following.order == step.order + 1


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the masks of a batch and from who holds which tokens.

    Args:
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        queries ([`Sharding`]): Who holds the queries of which tokens.
        keys ([`Sharding`]): Who holds the keys and values of which tokens; on as many ranks.
    """

    masks: tuple[Mask, ...]
    queries: Sharding
    keys: Sharding

    def __post_init__(self) -> None:
        length = min(mask.length for mask in self.masks)
        if self.queries.ranks != self.keys.ranks or max(self.queries.stop, self.keys.stop) > length:
            raise ShardingError(
                f"Queries of tokens {self.queries.start} to {self.queries.stop} on {self.queries.ranks} ranks and keys "
                f"of tokens {self.keys.start} to {self.keys.stop} on {self.keys.ranks} do not fit masks of {length} "
                "tokens: they must lie inside of these, on as many ranks."
            )

    @property
    def ranks(self) -> int:
        """Ranks of the ring."""
        return self.queries.ranks

    def blocks(self, rotating: Rotating) -> Sharding:
        """Who holds the blocks that rotate."""
        return self.keys if rotating == "kv" else self.queries

    @lru_cache(maxsize=256)  # noqa: B019, since plans are values
    def steps(self, rank: int, rotating: Rotating) -> tuple[Step, ...]:
        """The steps of `rank`, in order; steps in which it neither computes nor sends are left out."""
        own = _batch_tiles(self, rank, rank, rotating)
        steps = [Step(0, rank, own)] if own else []
        for order in range(1, self.ranks):
            source, target = (rank - order) % self.ranks, (rank + order) % self.ranks
            arriving, leaving = _batch_tiles(self, rank, source, rotating), _batch_tiles(self, target, rank, rotating)
            send, recv = _transfer(self, leaving, target, rotating), _transfer(self, arriving, source, rotating)
            if send or recv:
                steps.append(Step(order, source, arriving, send, recv))
        return tuple(steps)

    @lru_cache(maxsize=256)  # noqa: B019, since plans are values
    def gathered(self, rank: int) -> tuple[Tile, ...]:
        """The tiles of `rank` with all keys in sequence; columns are tokens counted from the first key."""
        runs, keys = self.queries.runs(rank), self.keys
        return _of_batch(self.masks, lambda mask: gathered_tiles(mask, runs, keys.start, keys.stop))

    def key_span(self, rank: int) -> tuple[int, int]:
        """The tokens `[start, stop)` between which all keys lie that the queries of `rank` see."""
        tiles, first = self.gathered(rank), self.keys.start
        return first + min((tile.k[0] for tile in tiles), default=0), first + max((t.k[1] for t in tiles), default=0)

    @property
    def pairs(self) -> int:
        """The (query, key) pairs that the masks admit."""
        if self.queries.length == self.keys.length == max(mask.length for mask in self.masks):
            return sum(mask.pairs for mask in self.masks)
        spans = (mask.keys(query) for mask in self.masks for query in range(self.queries.start, self.queries.stop))
        return sum(max(0, min(stop, self.keys.stop) - max(start, self.keys.start)) for start, stop in spans)


@lru_cache(maxsize=64)
def make_plan(masks: tuple[Mask, ...], queries: Sharding, keys: Sharding | None = None) -> Plan:
    """A [`Plan`] whose keys are held as the queries by default; the same arguments give the same object."""
    return Plan(masks, queries, queries if keys is None else keys)


def _batch_tiles(plan: Plan, rank: int, source: int, rotating: Rotating) -> tuple[Tile, ...]:
    """The tiles that `rank` computes with the block of `source`, rows of the batch with one mask together."""
    q_rank, k_rank = (rank, source) if rotating == "kv" else (source, rank)
    q_runs, k_runs = plan.queries.runs(q_rank), plan.keys.runs(k_rank)
    return _of_batch(plan.masks, lambda mask: tiles_between(mask, q_runs, k_runs))


def _of_batch(masks: tuple[Mask, ...], tiles_of: Callable[[Mask], tuple[Tile, ...]]) -> tuple[Tile, ...]:
    """The tiles of every mask, for rows of the batch with one mask together."""
    tiles: list[Tile] = []
    first = 0
    for row in range(1, len(masks) + 1):
        if row < len(masks) and masks[row] == masks[first]:
            continue
        tiles += [replace(tile, batch=(first, row)) for tile in tiles_of(masks[first])]
        first = row
    return tuple(tiles)


def _transfer(plan: Plan, tiles: tuple[Tile, ...], peer: int, rotating: Rotating) -> Transfer | None:
    if not tiles:
        return None
    ranges = [tile.k if rotating == "kv" else tile.q for tile in tiles]
    lone = len(tiles) == 1 and tiles[0].batch == (0, len(plan.masks))
    return Transfer(peer, min(start for start, _ in ranges), max(stop for _, stop in ranges), lone)
