"""How much memory a training step saves, by levels, and the level that a run takes by what its steps took so far.

The first step takes the cheapest level that needs less than half of the free memory by an estimate, and every later one
the cheapest level that fits by what was measured. Levels are ordered by what they cost in time: checkpointed layers
wait on the host, as far as its memory reaches; then MLPs are computed in tiles and attention in groups of heads; then
layers share checkpoints; then attention is computed again. Below 32K tokens a GPU tiles come first, since copies to the
host would take longer than the layers that they hide behind.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..config import Memory

SETTINGS = tuple(setting.name for setting in fields(Memory))  # in the order of the columns of `hf-burst plan`
HOST_ROOM = 0.85  # of a GPU's share of its host's memory; data loaders and caches need some, too
COPIES_HIDE_FROM = 32768  # tokens of a GPU; below, a layer's copy to the host takes longer than the layer
TILE = 16384  # tokens of a tile: products of matrices run at full speed
SHORT_TILE = 4096
TUNING = 7.0 * 2**30  # bytes of a GPU for kernels that spill registers, while Triton tunes those of recurrent layers
FIRST = 2.0  # a first step needs at most so many times its estimate
_TOWER = 32  # bytes that towers take for a byte of pixels or of sound, before they are measured
# of what an estimate says that a setting saves, what counts before it is measured; and by how much at most what it
# says that a setting costs is raised where estimates are too low
_SAVED = 0.75
_RAISED = 2.0
_REACH = 2.0  # for steps at most so many times as large a measurement counts
# what torch's allocator loses in gaps, as shares: of what a step takes, and of gradients where FSDP2 gathers weights;
# by default, and with expandable segments
GAPS = (0.16, 0.25)
GAPS_EXPANDABLE = (0.09, 0.15)


def keeping(first: int, layers: int, per_checkpoint: int) -> int:
    """How many of the `first` checkpointed layers keep their input: the first one of each `per_checkpoint` in a row,
    and each of the last `per_checkpoint` of all `layers`, because their inputs are needed at once."""
    least = max(0, layers - per_checkpoint)
    return -(-min(first, least) // per_checkpoint) + max(0, first - least)


def levels_for(
    tokens: int,
    kv_heads: int,
    causal: bool,
    checkpointing: bool,
    host_share: Callable[[Memory], float],
    fixed: Collection[str] = (),
    start: Memory | None = None,
) -> tuple[Memory, ...]:
    """The settings of every level for so many tokens of a GPU, from none to all of them, but for those that are `fixed`
    as in `start`. Levels have the same number for any length, so that ranks with other batches can agree on one; one
    that has nothing to change is like the one before it. `host_share` says for which share of the layers the host has
    room."""
    memory = start or Memory()
    found = []
    for changes in ({}, *_additions(tokens, kv_heads, causal, checkpointing)):
        memory = replace(memory, **{name: value for name, value in changes.items() if name not in fixed})
        if memory.activation_offloading and "activation_offloading" not in fixed:
            memory = replace(memory, activation_offloading=host_share(memory))
        found.append(memory)
    return tuple(found)


def _additions(tokens: int, kv_heads: int, causal: bool, checkpointing: bool) -> Iterator[dict[str, Any]]:
    """What each level adds to the one before it."""
    hides = tokens >= COPIES_HIDE_FROM
    tile = TILE if hides else SHORT_TILE
    host: dict[str, Any] = {"activation_offloading": 1.0}
    tiles = [{"tiled_mlp": tile if tokens > tile else 0}, {"head_groups": min(4, max(1, kv_heads))}]
    if not checkpointing:
        yield from tiles
        return
    yield from [host, *tiles] if hides else [*tiles, host]
    yield from ({"layers_per_checkpoint": count} for count in (2, 4))
    yield from ({"attention_keep": share} for share in ((0.5, 0.0) if causal else (0.0,)))
    yield {"head_groups": min(8, max(1, kv_heads))}


@dataclass(frozen=True)
class LayerSizes:
    """What the memory of a step is estimated from.

    Args:
        layers (`int`): Layers of the model.
        hidden (`int`): Elements of a token's hidden state.
        inner (`int`): Elements of a token inside of an MLP, of all experts that it is sent to.
        queries, keys (`int`): Elements of a token's queries, and of its keys.
        kv_heads (`int`): Key heads; 0 without attention.
        mixed (`int`): Elements of a token in the backward pass of a recurrent layer; 0 without one.
        itemsize (`int`): Bytes of an element of a hidden state.
        causal (`bool`): Whether queries see no later key.
        checkpointing (`bool`): Whether layers checkpoint.
        exchanges (`bool`): Whether several ranks share a sequence.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    kv_heads: int
    mixed: int
    itemsize: int
    causal: bool
    checkpointing: bool
    exchanges: bool

    def bytes_of_token(self, memory: Memory) -> float:
        """About what a token takes of a GPU: what layers keep of it, and the layer that runs backward."""
        if not self.checkpointing:
            row = self.hidden * 2 + max(2 * (self.queries + self.keys), self.mixed)
            inner = 0 if memory.tiled_mlp else 3 * self.inner
            return self.layers * (self._input + 2 * (row + inner)) + self.working(memory)
        together = memory.layers_per_checkpoint
        stay = self.layers * (1 - memory.activation_offloading)
        ahead = min(2, self.layers) if memory.activation_offloading else 0  # that came back
        inputs = min(self.layers, stay / together + ahead + together - 1)
        attentions = min(self.layers, stay + ahead)
        return self._input * inputs + self._attention(memory) * attentions + self.working(memory)

    def working(self, memory: Memory) -> float:
        """About what a token takes while a layer runs backward."""
        inputs = self.queries + 2 * self.keys
        groups = memory.head_groups
        again = self.queries * (1 if memory.attention_keep == 1 else 2)
        attention = 2 * (2 * self.hidden + 2 * inputs + again) + (4 + 2 * (groups > 1)) * inputs / groups
        inner = 0 if memory.tiled_mlp else 2 * (4 * self.inner + 4 * self.hidden + max(inputs, self.mixed))
        exchanged = 12 * inputs / groups if self.exchanges else 0
        return max(attention, inner, 2 * (self.mixed + 2 * self.hidden)) + exchanged

    def levels(self, tokens: int, host: float, fixed: Collection[str] = ()) -> tuple[Memory, ...]:
        """Those of a batch with so many tokens a GPU, where the host has so many bytes for each of them."""

        def host_share(memory: Memory) -> float:
            layer = tokens * (self._input / memory.layers_per_checkpoint + self._attention(memory))
            return min(self.layers, int(HOST_ROOM * host / layer)) / self.layers

        return levels_for(tokens, self.kv_heads, self.causal, self.checkpointing, host_share, fixed)

    @property
    def _input(self) -> int:
        return self.itemsize * self.hidden

    def _attention(self, memory: Memory) -> float:
        return memory.attention_keep * 2 * self.queries


class Size(NamedTuple):
    """How large the part of a batch is that a GPU computes."""

    tokens: int
    seen: float = 0.0  # bytes of what towers are given

    def growth_from(self, other: "Size") -> float:
        """How many times as much memory it may take."""
        return max(self.tokens / other.tokens, self.seen / other.seen if other.seen else 0.0)


class Taken(NamedTuple):
    """The bytes that a step took beyond what was there before it."""

    size: Size
    bytes: float


class MeasuredLevels:
    """Which level a step takes, by the bytes that earlier ones took. A step takes gradients in addition to what is
    proportional to its size.

    Args:
        sizes ([`LayerSizes`]): What the first step is estimated by.
        gradients (`float`): Bytes of the gradients of all weights that learn.
        sharded (`bool`): Whether FSDP2 gathers weights.
    """

    def __init__(self, sizes: LayerSizes, gradients: float, sharded: bool) -> None:
        self.sizes, self.gradients, self.sharded = sizes, gradients, sharded
        # by settings, and whether gradients were there before the step
        self.known: dict[tuple[Memory, bool], Taken] = {}
        self.short: list[tuple[Memory, Size]] = []  # what ran out of memory

    def choose(
        self, levels: Sequence[Memory], size: Size, free: float, gaps: tuple[float, float] = GAPS, added: bool = False
    ) -> tuple[int, float]:
        """The first level that fits into `free` bytes, or the one that needs the least if none does; and the bytes that
        the step is expected to take. With gradients that are there, to which its own are `added`."""
        own = 0.0 if added else self.gradients
        known = self._telling(size, added)
        if known:
            expected = [self._predicted(memory, size, known, own) for memory in levels]
            needs = [(1 + gaps[0]) * taken + self.sharded * gaps[1] * self.gradients for taken in expected]
        else:
            expected = [self._estimated(memory, size) + _TOWER * size.seen + own for memory in levels]
            needs = [FIRST * taken - (FIRST - 1) * own for taken in expected]
        order = range(len(levels))
        out = [self._ran_out(memory, size) for memory in levels]
        least = min(order, key=lambda level: (out[level], needs[level], -level))
        level = next((level for level in order if needs[level] <= free and not out[level]), least)
        return level, expected[level]

    def choose_forward(self, levels: Sequence[Memory], size: Size, free: float) -> int:
        """The first level whose tiles and groups of heads let a pass without a backward pass fit, or the last one."""
        takes = [size.tokens * self.sizes.working(memory) + _TOWER * size.seen for memory in levels]
        return next((level for level, bytes_ in enumerate(takes) if FIRST * bytes_ <= free), len(levels) - 1)

    def measured(self, memory: Memory, size: Size, taken: float, exact: bool = True, added: bool = False) -> None:
        """Takes up the bytes that a step took, or if they are not `exact` at most."""
        known = self.known.get((memory, added))
        growth = 1.0 if known is None else size.growth_from(known.size)
        tells = known is None or growth > 1 or taken >= known.bytes * growth
        if tells if exact else not self.known:
            self.known[memory, added] = Taken(size, taken)

    def ran_out(self, memory: Memory, size: Size, free: float) -> None:
        """Takes up that a step found less memory than it needed, where so many bytes were free."""
        self.short.append((memory, size))
        self.measured(memory, size, free)

    def _ran_out(self, memory: Memory, size: Size) -> bool:
        """Whether a step that takes no more ran out of memory."""
        takes = self.sizes.bytes_of_token(memory)
        return any(
            size.growth_from(known) >= 1 and takes >= self.sizes.bytes_of_token(other) for other, known in self.short
        )

    def _estimated(self, memory: Memory, size: Size) -> float:
        return size.tokens * self.sizes.bytes_of_token(memory)

    def _telling(self, size: Size, added: bool) -> dict[Memory, Taken]:
        """What was measured of steps that are not much smaller, and that had towers if this one has."""
        known = {
            key: taken
            for key, taken in self.known.items()
            if size.growth_from(taken.size) <= _REACH and (taken.size.seen or not size.seen)
        }
        alike = {memory: taken for (memory, kind), taken in known.items() if kind == added}
        return alike or {memory: taken for (memory, _), taken in known.items()}

    def _predicted(self, memory: Memory, size: Size, known: dict[Memory, Taken], gradients: float) -> float:
        """What a step takes, by a step with the same settings, or else with those that are estimated to take about as
        much."""
        here = self._estimated(memory, size)
        nearest = min(known, key=lambda other: (other != memory, abs(self._estimated(other, size) - here)))
        there = self._estimated(nearest, size)
        estimated = self._estimated(nearest, known[nearest].size)
        growth = size.growth_from(known[nearest].size)
        taken = known[nearest].bytes
        passing = max(0.0, taken - gradients)
        # the most is there when layers have all that they keep, or when all gradients have come
        measured = max(taken - passing + passing * growth, min(taken, _RAISED * estimated) * growth)
        if nearest == memory:
            return measured
        if here < there:
            saved = _SAVED * min(1.0, passing / estimated) * (there - here)
            return max(measured - saved, here + min(gradients, taken))
        # where most of it are gradients, nobody knows by how much the estimate is wrong
        wrong = taken / estimated if passing > gradients else _RAISED
        return measured + min(max(1.0, wrong), _RAISED) * (here - there)
