"""Which settings let a training step fit into memory: the rule behind `BurstConfig(memory="auto")`.

A step that fits as it is stays as it is. Otherwise settings are added, one after another, until it fits: checkpointed
layers wait on the host, as far as its memory reaches; then MLPs are computed in tiles and attention in groups of heads;
then layers share checkpoints; then attention is computed again. Sequences of less than 32K tokens a GPU begin with the
tiles, since copies to the host would take longer than the layers that they hide behind.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..config import Memory
from .gpus import Capacity
from .memory import MemoryEstimate, estimate_memory
from .model import ModelSize, Training

SETTINGS = tuple(setting.name for setting in fields(Memory))  # in the order of the columns of `hf-burst plan`
HOST_ROOM = 0.85  # of a GPU's share of its host's memory; data loaders and caches need some, too
COPIES_HIDE_FROM = 32768  # tokens of a GPU; below, a layer's copy to the host takes longer than the layer
TILE, SHORT_TILE = 16384, 4096  # tokens of a tile: products of matrices run at full speed
_STEP = 1024  # tokens by which the lengths differ that `longest` tries
_BUCKETS = 16  # between a power of two and the next one
_DEFAULTS = {setting.name: setting.default for setting in fields(Memory)}


class Fit(NamedTuple):
    """A level of the rule, and what a step is predicted to take with its settings.

    Args:
        level (`int`): How far the rule went, 0 for nothing. Some levels change nothing.
        training ([`Training`]): With the settings.
        memory ([`MemoryEstimate`]): What it takes.
        fits (`bool`): Whether the GPU and its host have it.
    """

    level: int
    training: Training
    memory: MemoryEstimate
    fits: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Those of [`Memory`], by name."""
        return {name: getattr(self.training, name) for name in SETTINGS}


def bucket(tokens: int) -> int:
    """The number of tokens for which settings are chosen: rounded up by a sixteenth of a power of two at most, so that
    batches of similar lengths are trained alike."""
    unit = max(1, 2 ** (max(0, tokens - 1).bit_length() - 1) // _BUCKETS)
    return -(-tokens // unit) * unit


def fits(memory: MemoryEstimate, capacity: Capacity) -> bool:
    """Whether a GPU has room for a step, and its host for what is offloaded."""
    return memory.total <= capacity.gpu_memory and memory.host <= HOST_ROOM * capacity.host_memory


def fit(
    model: ModelSize,
    training: Training,
    capacity: Capacity,
    fixed: Collection[str] = (),
    held: float | None = None,
    first_level: int = 0,
) -> Fit:
    """The first level of the rule that fits, or the one that takes the least of the GPU if none does.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How. Its [`SETTINGS`] are chosen.
        capacity ([`Capacity`]): On what.
        fixed (collection of `str`): Settings that stay as they are.
        held (`float`, *optional*): As in [`estimate_memory`].
        first_level (`int`, defaults to 0): The level to begin with, where earlier ones ran out of memory.
    """
    steps = levels(model, training, capacity, fixed)
    start = min(first_level, len(steps) - 1)
    while 0 < start < len(steps) - 1 and steps[start] == steps[start - 1]:
        start += 1  # nothing changes
    rows = []
    for level, how in list(enumerate(steps))[start:]:
        memory = estimate_memory(model, how, capacity, held)
        rows.append(Fit(level, how, memory, fits(memory, capacity)))
        if rows[-1].fits:
            return rows[-1]
    return min(rows, key=lambda row: row.memory.total)


def at_level(
    model: ModelSize, training: Training, capacity: Capacity, fixed: Collection[str], held: float | None, level: int
) -> Fit:
    """A level of the rule, whether it fits or not. Arguments as in [`fit`]."""
    how = levels(model, training, capacity, fixed)[level]
    memory = estimate_memory(model, how, capacity, held)
    return Fit(level, how, memory, fits(memory, capacity))


def longest(
    model: ModelSize,
    training: Training,
    capacity: Capacity,
    fixed: Collection[str] = (),
    held: float | None = None,
) -> int:
    """Tokens of the longest sequence that fits, to 1,024 tokens a GPU; 0 if none does. Arguments as in [`fit`]."""

    def has_room(length: int) -> bool:
        longer = replace(training, length=bucket(length), documents=(), parents=())  # as the rule will be asked
        return fit(model, longer, capacity, fixed, held).fits

    return longest_that(has_room, training.burst_size)


def longest_that(has_room: Callable[[int], bool], gpus: int) -> int:
    """The longest of lengths that there is room for, of which each GPU has 1,024 tokens more than of the one before."""
    unit, low, high = _STEP * gpus, 0, 1
    while high < 2**20 and has_room(high * unit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle * unit) else (low, middle)
    return low * unit


def levels(
    model: ModelSize, training: Training, capacity: Capacity, fixed: Collection[str] = ()
) -> tuple[Training, ...]:
    """The settings of every level, from none to all of them. Levels have the same number for any length, so that ranks
    with other batches can agree on one; a level that has nothing to change is like the one before it."""
    stays = {name: getattr(training, name) for name in fixed}
    how, steps = replace(training, **{**_DEFAULTS, **stays}), []
    for changes in ({}, *_additions(model, training)):
        wanted = {name: value for name, value in changes.items() if name not in fixed}
        offloads = "activation_offloading" in wanted or how.activation_offloading > 0
        how = replace(how, **wanted)
        if offloads and "activation_offloading" not in fixed:
            how = replace(how, activation_offloading=_offloaded(model, how, capacity))
        steps.append(how)
    return tuple(steps)


def _additions(model: ModelSize, training: Training) -> Iterator[dict[str, Any]]:
    """What each level adds to the one before it."""
    hides = training.tokens >= COPIES_HIDE_FROM
    tile = TILE if hides else SHORT_TILE
    groups = min(4, max(1, model.kv_heads))
    host: dict[str, Any] = {"activation_offloading": 1.0}
    tiles: list[dict[str, Any]] = [{"tiled_mlp": tile if training.tokens > tile else 0}, {"head_groups": groups}]
    if not training.checkpointing:
        yield from tiles
        return
    yield from [host, *tiles] if hides else [*tiles, host]
    yield from ({"layers_per_checkpoint": count} for count in (2, 4))
    parts = all(pattern.causal for pattern, _ in model.patterns)  # of an encoder's attention none can be kept
    yield from ({"attention_keep": share} for share in ((0.5, 0.0) if parts else (0.0,)))
    yield {"head_groups": min(8, max(1, model.kv_heads))}


def _offloaded(model: ModelSize, training: Training, capacity: Capacity) -> float:
    """The share of the layers that the host holds: all but the last one, which never leaves, if it has room."""
    layers = model.layers
    for count in range(layers, 0, -1):
        how = replace(training, activation_offloading=count / layers)
        if how.host_bytes(model) <= HOST_ROOM * capacity.host_memory:
            return count / layers
    return 0.0
