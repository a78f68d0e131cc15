"""Schedules: for every rank, the list of steps that computes a mask once, forward or backward.

A step is one rotation of the ring: at distance s, the block of rank r visits rank (r + s) mod P, straight from its home
and cut to what the mask needs there. What visits is either K and V (`"kv"`) or the queries with what belongs to
them (`"q"`). In the backward pass the gradients of the visitors return to their home in the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from .mask import Mask
from .sharding import Sharding
from .tiles import Tile, gathered_tiles, tiles_between

Rotating = Literal["kv", "q"]


@dataclass(frozen=True)
class Transfer:
    """Rows `[start, stop)` of a shard that travel to or from `peer`.

    `lone` says that one tile covers exactly these rows, so that a gradient returns as the kernel made it; several
    tiles are first summed in the accumulation dtype.
    """

    peer: int
    start: int
    stop: int
    lone: bool

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """One round of a rank.

    Args:
        distance (`int`): How far round the ring the visitors have come; 0 is the rank's own block.
        tiles (`tuple[Tile, ...]`): What this rank computes.
        send (`Transfer`, *optional*): The rows of this rank that visit another one in this step.
        recv (`Transfer`, *optional*): The rows that visit this rank.
    """

    distance: int
    tiles: tuple[Tile, ...]
    send: Transfer | None = None
    recv: Transfer | None = None


def goes_ahead(step: Step, following: Step, returning: bool) -> bool:
    """Whether the visitors of the following step are sent before `step` computes, or after its gradients.

    Visitors of distance s + 1 go before the gradients of distance s, and these before the visitors of any larger
    distance: one order of all rounds, kept by every rank whatever steps it leaves out. Backends that carry out rounds
    in order (NCCL) would wait for ever if the two ends of a message had it at different places.

    Args:
        step ([`Step`]): What is computed next.
        following ([`Step`]): The step after it, not always of the next distance.
        returning (`bool`): Whether gradients return, as in the backward pass.
    """
    return not returning or step.distance == 0 or following.distance == step.distance + 1


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the masks of a batch and the ownership of its chunks.

    Args:
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        sharding ([`Sharding`]): Who holds what.
    """

    masks: tuple[Mask, ...]
    sharding: Sharding

    def steps(self, rank: int, rotating: Rotating) -> tuple[Step, ...]:
        """The steps of `rank` when `rotating` ("kv" or "q") travels, in order of distance; empty steps are left out."""
        return _schedule(self, rank, rotating)

    def gathered(self, rank: int) -> tuple[Tile, ...]:
        """What `rank` computes with the keys of the whole sequence; columns of the tiles are tokens."""
        return _gathered(self, rank)

    def reach(self, rank: int) -> tuple[int, int]:
        """The tokens `[start, stop)` between which all keys lie that the queries of `rank` see."""
        tiles = self.gathered(rank)
        return min(tile.k[0] for tile in tiles), max(tile.k[1] for tile in tiles)

    @property
    def pairs(self) -> int:
        """The (query, key) pairs that the masks admit."""
        return sum(mask.pairs for mask in self.masks)

    def __str__(self) -> str:
        lines = [
            f"{len(self.masks)} x {self.sharding.length} tokens over {self.sharding.ranks} ranks, "
            f"{len(self.sharding.owners)} chunks, {self.pairs} pairs"
        ]
        for rank in range(self.sharding.ranks):
            runs = ", ".join(f"{run.start}-{run.stop}" for run in self.sharding.runs(rank))
            lines.append(f"rank {rank}: tokens {runs}")
            for step in self.steps(rank, "kv"):
                tiles = ", ".join(_describe(tile) for tile in step.tiles) or "nothing"
                source = f" of rank {step.recv.peer}" if step.recv else ""
                to = f"; sends {step.send.start}:{step.send.stop} to rank {step.send.peer}" if step.send else ""
                lines.append(f"  step {step.distance}: {tiles}{source}{to}")
        return "\n".join(lines)


def _describe(tile: Tile) -> str:
    band = "" if tile.low is None and tile.high is None else f" band {tile.low}..{tile.high}"
    parts = f" in {len(tile.segments) - 1} segments" if tile.segments else ""
    return f"q {tile.q[0]}:{tile.q[1]} x k {tile.k[0]}:{tile.k[1]}{band}{parts}"


@lru_cache(maxsize=64)
def make_plan(masks: tuple[Mask, ...], sharding: Sharding) -> Plan:
    """A [`Plan`]; the same arguments give the same object, so that its schedules are made once."""
    return Plan(masks, sharding)


@lru_cache(maxsize=256)
def _schedule(plan: Plan, rank: int, rotating: Rotating) -> tuple[Step, ...]:
    ranks = plan.sharding.ranks
    steps = []
    for distance in range(ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        arriving = _batch_tiles(plan, rank, source, rotating)
        step = Step(distance, arriving)
        if distance:
            leaving = _batch_tiles(plan, target, rank, rotating)
            batch = len(plan.masks)
            step = Step(
                distance,
                arriving,
                _transfer(leaving, target, rotating, batch),
                _transfer(arriving, source, rotating, batch),
            )
        if step.tiles or step.send:
            steps.append(step)
    return tuple(steps)


def _batch_tiles(plan: Plan, host: int, guest: int, rotating: Rotating) -> tuple[Tile, ...]:
    """The tiles that `host` computes with the visiting block of `guest`, rows of the batch with one mask together."""
    q_rank, k_rank = (host, guest) if rotating == "kv" else (guest, host)
    return _of_batch(plan.masks, lambda mask: tiles_between(mask, plan.sharding, q_rank, k_rank))


@lru_cache(maxsize=256)
def _gathered(plan: Plan, rank: int) -> tuple[Tile, ...]:
    return _of_batch(plan.masks, lambda mask: gathered_tiles(mask, plan.sharding, rank))


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


def _transfer(tiles: tuple[Tile, ...], peer: int, rotating: Rotating, batch: int) -> Transfer | None:
    if not tiles:
        return None
    ranges = [tile.k if rotating == "kv" else tile.q for tile in tiles]
    lone = len(tiles) == 1 and tiles[0].batch == (0, batch)
    return Transfer(peer, min(start for start, _ in ranges), max(stop for _, stop in ranges), lone)
