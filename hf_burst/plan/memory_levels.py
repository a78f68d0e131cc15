"""How much memory a training step saves, by levels, and the level that a run takes by what its steps took so far.

The first step takes the cheapest level that needs less than half of the free memory by an estimate, and every later one
the cheapest level that fits by what was measured. Levels are ordered by what they cost in time: checkpointed layers
wait on the host, as far as its memory reaches; then MLPs are computed in tiles and attention in groups of heads; then
layers share checkpoints; then attention is computed again. Below 32K tokens a GPU tiles come first, since copies to the
host would take longer than the layers that they hide behind.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..config import Memory
from .layer_sizes import StepEstimate

SETTINGS = tuple(vars(Memory()))  # in the order of the columns of `hf-burst plan`
HOST_ROOM = 0.85  # of a GPU's share of its host's memory; data loaders and caches need some, too
COPIES_HIDE_FROM = 32768  # tokens of a GPU; below, a layer's copy to the host takes longer than the layer
TILE = 16384  # tokens of a tile: products of matrices run at full speed
SHORT_TILE = 4096  # below 4 * TILE tokens of a GPU: TILE is more than a quarter of these, and saves little
TUNING = 7.0 * 2**30  # bytes of a GPU for kernels that spill registers, while Triton tunes those of recurrent layers
FIRST = 2.0  # a first step needs at most so many times its estimate
_TOWER = 32  # bytes that towers take for a byte of pixels or of sound, before they are measured
# of what an estimate says that a setting saves, what counts before it is measured; and by how much at most what it
# says that a setting costs is raised where estimates are too low
_SAVED = 0.75
_RAISED = 2.0
_REACH = 2.0  # for steps at most so many times as large a measurement counts
# what torch's allocator holds beyond its tensors, and what formulas miss, as shares: of what comes and goes in a step,
# and of gradients that come where activations went; by whether it has expandable segments
GAPS = {False: (0.16, 0.35), True: (0.09, 0.15)}
Settings = TypeVar("Settings", bound=Memory)


def levels_for(
    estimate: StepEstimate, start: Settings, tokens: int, host: float, fixed: Collection[str] = ()
) -> tuple[Settings, ...]:
    """The settings of every level for so many tokens of a GPU and bytes of the host, from none to all of them, but for
    those that are `fixed` as in `start`. Levels have the same number for any length, so that ranks with other batches
    can agree on one; one that has nothing to change is like the one before it."""
    sizes = estimate.sizes
    hides = tokens >= COPIES_HIDE_FROM
    tile = TILE if tokens >= 4 * TILE else SHORT_TILE
    added: list[dict[str, Any]] = [
        {"tiled_mlp": tile if tokens > tile else 0},
        {"head_groups": min(4, max(1, sizes.kv_heads))},
    ]
    if estimate.checkpointing:
        added.insert(0 if hides else len(added), {"activation_offloading": 1.0})
        added += [{"layers_per_checkpoint": count} for count in (2, 4)]
        added += [{"attention_keep": share} for share in ((0.5, 0.0) if sizes.causal else (0.0,))]
        added += [{"head_groups": min(8, max(1, sizes.kv_heads))}]
    found = list[Settings]()
    for changes in (vars(Memory()), *added):
        start = replace(start, **{name: value for name, value in changes.items() if name not in fixed})
        if start.activation_offloading and "activation_offloading" not in fixed:
            start = replace(start, activation_offloading=_share_of_host(estimate, start, HOST_ROOM * host / tokens))
        found.append(start)
    return tuple(found)


def _share_of_host(estimate: StepEstimate, memory: Memory, room: float) -> float:
    """The largest share of layers that the host has room for, in bytes of a token. The last layer never leaves."""
    sizes = estimate.sizes
    taken = partial(sizes.host_bytes, memory, estimate.itemsize)
    most = bisect_right(range(sizes.layers), room, key=taken) - 1
    return 1.0 if most == sizes.layers - 1 else most / sizes.layers


def named(settings: Memory, nothing: str = "nothing changed") -> str:
    """The settings that differ from the defaults, as written in a config."""
    changed = [(name, own) for name in SETTINGS if (own := getattr(settings, name)) != getattr(Memory, name)]
    return ", ".join(f"{name}={own:g}" for name, own in changed) or nothing


class Size(NamedTuple):
    """How large the part of a batch is that a GPU computes, and whether it finds gradients, to which it adds."""

    tokens: int
    seen: float = 0.0  # bytes of what towers are given
    added: bool = False

    def growth_from(self, other: "Size") -> float:
        """How many times as much memory it may take."""
        return max(self.tokens / other.tokens, self.seen / other.seen if other.seen else 0.0)


class Taken(NamedTuple):
    """The bytes that a step with these settings took beyond what was there before it."""

    memory: Memory
    size: Size
    bytes: float

    def tells_of(self, size: Size) -> bool:
        """Whether it is of a step that is not much smaller, and that had towers if this one has."""
        return size.growth_from(self.size) <= _REACH and (self.size.seen > 0 or not size.seen)


class MeasuredLevels:
    """Which level a step takes, by the bytes that earlier ones took. A step takes gradients in addition to what is
    proportional to its size.

    Args:
        estimate ([`StepEstimate`]): What the first step is chosen by.
        gradients (`float`): Bytes of the gradients of all weights that learn, but for those that lie on the host.
        sharded (`float`): Bytes of all of them, wherever they lie, if FSDP2 gathers weights.
    """

    def __init__(self, estimate: StepEstimate, gradients: float, sharded: float) -> None:
        self.estimate, self.gradients, self.sharded = estimate, gradients, sharded
        self.known: dict[tuple[Memory, bool], Taken] = {}  # by settings, and whether gradients were there
        self.short: list[tuple[Memory, Size]] = []  # what ran out of memory

    def choose(self, levels: Sequence[Memory], size: Size, free: float, expandable: bool = False) -> tuple[int, float]:
        """The first level that fits into `free` bytes, or the one that needs the least if none does; and the bytes that
        the step is expected to take."""
        own = 0.0 if size.added else self.gradients
        near = [known for known in self.known.values() if known.tells_of(size)]
        if near:
            share, of_gradients = GAPS[expandable]
            factor = 1 + share
            more = of_gradients * self.sharded
            expected = [self._predicted(memory, size, near, own) for memory in levels]
        else:
            factor = FIRST
            more = (1 - FIRST) * own
            expected = [self._estimated(memory, size) + _TOWER * size.seen + own for memory in levels]
        needs = [
            (self._ran_out(memory, size), factor * taken + more) for memory, taken in zip(levels, expected, strict=True)
        ]
        order = range(len(levels))
        least = min(order, key=lambda level: (*needs[level], -level))
        level = next((level for level in order if needs[level] <= (False, free)), least)
        return level, expected[level]

    def choose_forward(self, levels: Sequence[Memory], size: Size, free: float) -> int:
        """The first level whose tiles and groups of heads let a pass without a backward pass fit, or the last one."""
        takes = [size.tokens * self.estimate.working(memory) + _TOWER * size.seen for memory in levels]
        return next((level for level, bytes_ in enumerate(takes) if FIRST * bytes_ <= free), len(levels) - 1)

    def measured(self, memory: Memory, size: Size, taken: float, exact: bool = True) -> None:
        """Takes up the bytes that a step took, or if they are not `exact` at most."""
        known = self.known.get((memory, size.added))
        growth = 1.0 if known is None else size.growth_from(known.size)
        tells = known is None or growth > 1 or taken >= known.bytes * growth
        if tells if exact else not self.known:
            self.known[memory, size.added] = Taken(memory, size, taken)

    def ran_out(self, memory: Memory, size: Size, free: float) -> None:
        """Takes up that a step found less memory than it needed, where so many bytes were free."""
        self.short.append((memory, size))
        self.measured(memory, size, free)

    def _ran_out(self, memory: Memory, size: Size) -> bool:
        """Whether a step that takes no more ran out of memory."""
        takes = self.estimate.bytes_of_token
        return any(size.growth_from(known) >= 1 and takes(memory) >= takes(other) for other, known in self.short)

    def _estimated(self, memory: Memory, size: Size) -> float:
        return size.tokens * self.estimate.bytes_of_token(memory)

    def _predicted(self, memory: Memory, size: Size, near: list[Taken], own: float) -> float:
        """What a step takes, its `own` gradients among it, by a step with the same settings, or else with those that
        are estimated to take about as much."""
        here = self._estimated(memory, size)

        def distance(known: Taken) -> tuple[bool, bool, float]:
            apart = abs(self._estimated(known.memory, size) - here)
            return known.size.added != size.added, known.memory != memory, apart

        other, before, taken = min(near, key=distance)
        growth = size.growth_from(before)
        estimated = self._estimated(other, before)
        passing = max(0.0, taken - own)
        # the most is there when layers have all that they keep, or when all gradients have come
        measured = max(taken + passing * (growth - 1), min(taken, _RAISED * estimated) * growth)
        dearer = here - self._estimated(other, size)
        if dearer < 0:
            return max(measured + _SAVED * min(1.0, passing / estimated) * dearer, here + min(own, taken))
        return measured + min(max(1.0, taken / estimated), _RAISED) * dearer
