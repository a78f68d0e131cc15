"""Steps: for every rank of a ring, the list that computes a mask once, forward or backward.

In step s the block of rank r is used by rank (r + s) mod P. It travels straight from its owner, cut to the rows that
the mask needs there. Either K and V rotate (`"kv"`), or the queries with all that belongs to them (`"q"`). In the
backward pass the gradients of the rotating block return to its owner in the same step.

Over several hosts a ring has two levels (the double ring of BurstEngine, arXiv 2509.19836). In step o of the outer ring
a block crosses from its owner to the rank of the same number on the host that is o hosts ahead. The ranks of that host
pass it on in the steps of an inner ring. Its gradients are summed there, and cross back once.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

from .mask import Mask
from .sharding import Sharding
from .tiles import Tile, tiles_between

Rotating = Literal["kv", "q"]


@dataclass(frozen=True)
class Transfer:
    """Rows `[start, stop)` of a shard that travel to or from `peer`. If a `single_tile` covers exactly these rows, a
    gradient returns as the kernel made it; several tiles are first summed in the accumulation dtype."""

    peer: int
    start: int
    stop: int
    single_tile: bool

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """One step of a rank.

    Args:
        order (`int`): When it comes; both ends of a transfer have the same number. Step 0 uses the block that the rank
            holds: its own, or one that crossed to it.
        source (`int`): The rank whose block is used.
        tiles (`tuple[Tile, ...]`): What this rank computes with it; nothing in the outer ring.
        send (`Transfer`, *optional*): The rows that this rank holds and another one uses in this step.
        recv (`Transfer`, *optional*): The rows of `source` that this rank uses, from the rank that holds them.
    """

    order: int
    source: int
    tiles: tuple[Tile, ...]
    send: Transfer | None = None
    recv: Transfer | None = None


def sends_before_compute(step: Step, following: Step, returning: bool) -> bool:
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
        hosts (`int`, defaults to 1): Hosts of the ring ranks, neighbours of each other. They divide the ranks.
    """

    masks: tuple[Mask, ...]
    queries: Sharding
    keys: Sharding
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the ring."""
        return self.queries.ranks

    def blocks(self, rotating: Rotating) -> Sharding:
        """Who holds the blocks that rotate."""
        return self.keys if rotating == "kv" else self.queries

    @property
    def per_host(self) -> int:
        """Ring ranks of one host."""
        return self.ranks // self.hosts

    def host(self, rank: int) -> range:
        """The ranks on the host of a rank."""
        first = rank - rank % self.per_host
        return range(first, first + self.per_host)

    @lru_cache(maxsize=1024)  # noqa: B019, since plans are values
    def steps(self, rank: int, rotating: Rotating, crossing: int = 0) -> tuple[Step, ...]:
        """The steps in which `rank` uses the blocks of a host; those in which it neither computes nor sends are left
        out.

        Args:
            rank (`int`): The ring rank.
            rotating (`str`): What travels.
            crossing (`int`, defaults to 0): The step of the outer ring in which the blocks came to this host; those of
                this host itself by default, which are all with one host.
        """
        number, per_host, here = rank % self.per_host, self.per_host, self.host(rank)
        there = self.host((rank - crossing * per_host) % self.ranks)  # the host that the blocks came from
        own = _batch_tiles(self, rank, there[number], rotating)
        steps = [Step(0, there[number], own)] if own else []
        for order in range(1, per_host):
            before = (number - order) % per_host
            behind = (number + order) % per_host
            arriving = _batch_tiles(self, rank, there[before], rotating)
            leaving = _batch_tiles(self, here[behind], there[number], rotating)
            send = _transfer(self, leaving, here[behind], rotating)
            recv = _transfer(self, arriving, here[before], rotating)
            if send or recv:
                steps.append(Step(order, there[before], arriving, send, recv))
        return tuple(steps)

    @lru_cache(maxsize=256)  # noqa: B019, since plans are values
    def crossings(self, rank: int, rotating: Rotating) -> tuple[Step, ...]:
        """The steps of the outer ring, in which blocks cross between hosts; those in which `rank` sends nothing and its
        host computes nothing are left out. In the first one, the only one of one host, nothing crosses."""
        steps = [Step(0, rank, ())]
        for order in range(1, self.hosts):
            source = (rank - order * self.per_host) % self.ranks
            target = (rank + order * self.per_host) % self.ranks
            send = _transfer(self, self._used(target, rank, rotating), target, rotating)
            recv = _transfer(self, self._used(rank, source, rotating), source, rotating)
            if send or self.visited(rank, rotating, order):
                steps.append(Step(order, source, (), send, recv))
        return tuple(steps)

    @lru_cache(maxsize=1024)  # noqa: B019, since plans are values
    def visited(self, rank: int, rotating: Rotating, crossing: int) -> bool:
        """Whether a rank of the host of `rank` computes anything in a step of the outer ring; the first one is always
        gone through."""
        ahead = crossing * self.per_host
        return not crossing or any(self._used(one, (one - ahead) % self.ranks, rotating) for one in self.host(rank))

    def held(self, rank: int, rotating: Rotating, crossing: int) -> tuple[int, int]:
        """The rows `[start, stop)` of a shard that a rank holds in a step of the outer ring: all of its own, or those
        that crossed to it, possibly none."""
        if not crossing:
            return 0, self.blocks(rotating).tokens(rank)
        came = next((step.recv for step in self.crossings(rank, rotating) if step.order == crossing), None)
        return (came.start, came.stop) if came else (0, 0)

    @lru_cache(maxsize=1024)  # noqa: B019, since plans are values
    def _used(self, rank: int, source: int, rotating: Rotating) -> tuple[Tile, ...]:
        """The tiles that all ranks of the host of `rank` compute with the block of `source`."""
        return tuple(tile for one in self.host(rank) for tile in _batch_tiles(self, one, source, rotating))


@lru_cache(maxsize=64)
def make_plan(masks: tuple[Mask, ...], queries: Sharding, keys: Sharding | None = None, hosts: int = 1) -> Plan:
    """A [`Plan`] whose keys are held as the queries by default; the same arguments give the same object."""
    return Plan(masks, queries, keys or queries, hosts)


@lru_cache(maxsize=4096)
def _batch_tiles(plan: Plan, rank: int, source: int, rotating: Rotating) -> tuple[Tile, ...]:
    """The tiles that `rank` computes with the block of `source`, rows of the batch with one mask together."""
    q_rank, k_rank = (rank, source) if rotating == "kv" else (source, rank)
    runs = plan.queries.runs(q_rank), plan.keys.runs(k_rank)
    tiles: list[Tile] = []
    first = 0
    for mask, rows in groupby(plan.masks):
        last = first + len(list(rows))
        tiles += [replace(tile, batch=(first, last)) for tile in tiles_between(mask, *runs)]
        first = last
    return tuple(tiles)


def _transfer(plan: Plan, tiles: tuple[Tile, ...], peer: int, rotating: Rotating) -> Transfer | None:
    if not tiles:
        return None
    ranges = [tile.k if rotating == "kv" else tile.q for tile in tiles]
    single = len(tiles) == 1 and tiles[0].batch == (0, len(plan.masks))
    return Transfer(peer, min(start for start, _ in ranges), max(stop for _, stop in ranges), single)
