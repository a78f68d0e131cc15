"""Which level of `BurstConfig(memory="auto")` lets a training step fit into memory, by its prediction."""

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from ..plan.layer_sizes import StepEstimate
from ..plan.memory_levels import HOST_ROOM, levels_for
from .gpus import Capacity
from .memory import MemoryEstimate, estimate_memory
from .model import ModelSize, Training

_STEP = 1024  # tokens by which the lengths differ that `longest` tries
_BUCKETS = 16  # between a power of two and the next one


class Fit(NamedTuple):
    """What a step is predicted to take with the settings of a level of the rule.

    Args:
        training ([`Training`]): With the settings.
        memory ([`MemoryEstimate`]): What it takes.
        fits (`bool`): Whether the GPU and its host have it.
    """

    training: Training
    memory: MemoryEstimate
    fits: bool


def bucket(tokens: int) -> int:
    """Tokens, rounded up by a sixteenth of a power of two at most: the longest sequence is one of these lengths."""
    unit = max(1, 2 ** (max(0, tokens - 1).bit_length() - 1) // _BUCKETS)
    return -(-tokens // unit) * unit


def fits(memory: MemoryEstimate, capacity: Capacity) -> bool:
    """Whether a GPU has room for a step, and its host for what is offloaded."""
    return memory.total <= capacity.gpu_memory and memory.host <= HOST_ROOM * capacity.host_memory


def fit(model: ModelSize, training: Training, capacity: Capacity, fixed: Collection[str] = ()) -> Fit:
    """The first level of the rule that fits, or the one that takes the least of the GPU if none does.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How. Its [`SETTINGS`] are chosen.
        capacity ([`Capacity`]): On what.
        fixed (collection of `str`): Settings that stay as they are.
    """
    rows = []
    for how in levels(model, training, capacity, fixed):
        memory = estimate_memory(model, how, capacity)
        if fits(memory, capacity):
            return Fit(how, memory, True)
        rows.append(Fit(how, memory, False))
    return min(rows, key=lambda row: row.memory.total)


def longest(model: ModelSize, training: Training, capacity: Capacity, fixed: Collection[str] = ()) -> int:
    """Tokens of the longest sequence that fits, to 1,024 tokens a GPU; 0 if none does. Arguments as in [`fit`]."""

    def has_room(length: int) -> bool:
        return fit(model, replace(training, length=bucket(length), documents=(), parents=()), capacity, fixed).fits

    return longest_that(has_room, training.burst_size)


def longest_that(has_room: Callable[[int], bool], gpus: int) -> int:
    """The longest of lengths that there is room for, of which each GPU has 1,024 tokens more than of the one before."""
    unit = _STEP * gpus
    most = 1
    while most < 2**20 and has_room(most * unit):
        most *= 2
    return unit * (bisect_left(range(most), True, most // 2 + 1, key=lambda count: not has_room(count * unit)) - 1)


def levels(
    model: ModelSize, training: Training, capacity: Capacity, fixed: Collection[str] = ()
) -> tuple[Training, ...]:
    """The settings of every level, see [`levels_for`]."""
    estimate = StepEstimate(model, training.itemsize, training.checkpointing, exchanges=training.burst_size > 1)
    return levels_for(estimate, training, training.tokens, capacity.host_memory, fixed)
