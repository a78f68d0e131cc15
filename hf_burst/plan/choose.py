"""The choice of a schedule. On one host it is a rule that follows from the heads, the ranks and the documents of a
batch. A search over predicted seconds was no better where both were measured (recipes/benchmarks/README.md, "The rule
for schedules"). Over several hosts links differ by orders of magnitude, so that the fastest prediction is taken. It
costs the host some tenths of a second for a batch over 64 ranks, and less over fewer."""

import math
from dataclasses import dataclass
from functools import lru_cache

from ..config import RingKind, Schedule
from .cost import estimate
from .machine import Machine
from .mask import Mask
from .sharding import Sharding
from .work import Layer

# of the keys of other ranks; the cost model has rings break even near it, with documents and windows alike
_AT_HOME = 0.1


@dataclass(frozen=True)
class Choice:
    """The schedule of a layer, and why it was chosen, as a part of a sentence."""

    schedule: Schedule
    reason: str


@lru_cache(maxsize=256)
def choose(layer: Layer, machine: Machine) -> Choice:
    """The schedule of a layer, the same on all ranks.

    A ring where documents mostly stay at home, and over two ranks: its only exchange is hidden behind the own block.
    Else neighbouring ranks of one host exchange heads (Ulysses), as many as the heads allow, with a ring around them.
    K and V travel round the ring. With as many key heads as query heads it is the `"burst"` ring, whose backward pass
    then sends three tensors instead of four (BurstAttention, arXiv 2403.09347).

    Over several hosts it is the schedule that is predicted to take the least time.

    Args:
        layer ([`Layer`]): What is computed.
        machine ([`Machine`]): On what.
    """
    ranks, q_heads, kv_heads = layer.ranks, layer.shapes.q_heads, layer.shapes.kv_heads
    if ranks == 1:
        return Choice(Schedule(), "one rank exchanges nothing")
    if ranks > machine.ranks_per_host:
        return _fastest(layer, machine)
    share = fetched_share(layer.masks, layer.sharding)
    needed = f"a rank needs {share:.0%} of the others' keys"
    ring: RingKind = "burst" if q_heads == kv_heads else "kv_ring"
    if share <= _AT_HOME:
        return Choice(Schedule(ring), f"documents mostly stay at home: {needed}")
    if ranks == 2:
        return Choice(Schedule(ring), f"two ranks hide their only exchange behind their own block; {needed}")
    ulysses = math.gcd(ranks, q_heads, kv_heads)
    if ulysses == 1:
        return Choice(Schedule(ring), f"no number of ranks divides the {q_heads} query and {kv_heads} key heads")
    reason = f"{ulysses} ranks of one host divide the {q_heads} query and {kv_heads} key heads; {needed}"
    return Choice(Schedule("kv_ring" if ulysses == ranks else ring, ulysses), reason)


def _fastest(layer: Layer, machine: Machine) -> Choice:
    """The schedule that is predicted to take the least time."""
    heads = layer.shapes.q_heads, layer.shapes.kv_heads
    costs = {one: estimate(one, layer, machine) for one in candidates(layer.ranks, *heads, machine.ranks_per_host)}
    fastest = min(costs, key=lambda one: costs[one].total_s)
    across = f"with {costs[fastest].across_bytes / 1e6:,.0f} MB of a rank between hosts"
    return Choice(fastest, f"predicted to be the fastest of {len(costs)}, {across}")


def fetched_share(masks: tuple[Mask, ...], sharding: Sharding) -> float:
    """The share of the other ranks' keys that the queries of a rank see, on average over the ranks."""
    fetched = 0
    for rank in range(sharding.ranks):
        runs = sharding.runs(rank)
        # the later a query, the later its keys: those of a run are one interval, and its own tokens lie in it
        seen = sorted((mask.keys(run.start)[0], mask.keys(run.stop - 1)[1]) for mask in masks for run in runs)
        end = 0
        for start, stop in seen:
            fetched += max(0, stop - max(start, end))
            end = max(end, stop)
    return fetched / sharding.length / (sharding.ranks - 1) - 1 / (sharding.ranks - 1)


def candidates(ranks: int, q_heads: int, kv_heads: int, ranks_per_host: int) -> list[Schedule]:
    """The schedules that a group can run.

    Products whose Ulysses groups would lie across hosts while hosts divide them no further are left out: the same
    degree inside of hosts is never slower.
    """
    if ranks == 1:
        return [Schedule()]
    schedules = [Schedule("kv_ring"), Schedule("burst"), Schedule("all_gather"), Schedule("kv_ring", ranks)]
    for ulysses in range(2, ranks):
        if ranks_per_host % ulysses == 0 or ulysses % ranks_per_host == 0:
            schedules += [Schedule("kv_ring", ulysses), Schedule("burst", ulysses), Schedule("all_gather", ulysses)]
    return [schedule for schedule in schedules if schedule.refusal(ranks, q_heads, kv_heads) is None]


def name_of(schedule: Schedule, ranks: int) -> str:
    """The name of a schedule; Ulysses of all ranks has no ring around it."""
    return "ulysses" if schedule.ulysses == ranks > 1 else str(schedule)
