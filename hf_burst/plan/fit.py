"""Which settings let a training fit into memory and take the least time: tiles, groups of heads, offloading, and
attention that is computed again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from .machine import Machine
from .memory import MemoryEstimate, estimate_memory
from .model import ModelSize, Training
from .step import StepEstimate, estimate_step

ROOM = 0.92  # of a GPU's memory; the rest is for the allocator, NCCL and what CUDA itself takes
HOST_ROOM = 0.85  # of the memory that its host has for it; data loaders and caches need some, too
TILE = 16384  # tokens of a tile: products of matrices run at full speed, and little is there of it
_GROUPS = 4  # of the heads: a quarter of what attention needs inside, and calls that are long enough
_STEP = 1024  # tokens by which lengths differ


class Fit(NamedTuple):
    """Settings, and what a step with them is predicted to take."""

    training: Training
    step: StepEstimate
    memory: MemoryEstimate
    fits: bool


def fits(memory: MemoryEstimate, machine: Machine, taken: float = 0.0) -> bool:
    """Whether a GPU has room for it beside the bytes that others have `taken`, and its host for what is offloaded."""
    return memory.total + taken <= ROOM * machine.memory and memory.host <= HOST_ROOM * machine.host_memory


def fit(model: ModelSize, training: Training, machine: Machine, taken: float = 0.0) -> Fit:
    """The settings with which a step fits and takes the least time, or those that take the least memory if none fits.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How. Tiles, groups, offloading and the attention that is kept are chosen.
        machine ([`Machine`]): On what.
        taken (`float`, defaults to 0.0): Bytes of a GPU that are taken beside what [`estimate_memory`] knows.
    """
    estimates = [(how, estimate_memory(model, how, machine)) for how in _candidates(model, training, machine, taken)]
    able = [(how, memory) for how, memory in estimates if fits(memory, machine, taken)]
    least = min(estimates, key=lambda entry: (entry[1].host > HOST_ROOM * machine.host_memory, entry[1].total))
    rows = [Fit(how, estimate_step(model, how, machine), memory, bool(able)) for how, memory in able or [least]]
    return min(rows, key=lambda row: row.step.total_s)  # the first of equals, which changes the least


def longest(model: ModelSize, training: Training, machine: Machine, taken: float = 0.0) -> int:
    """Tokens of the longest sequence that fits, to 1,024 tokens a GPU; 0 if none does. Arguments as in [`fit`]."""
    unit = _STEP * training.burst_size

    def has_room(units: int) -> bool:
        return fit(model, replace(training, length=units * unit, documents=()), machine, taken).fits

    low, high = 0, 1
    while high < 2**20 and has_room(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low * unit


def _candidates(model: ModelSize, training: Training, machine: Machine, taken: float) -> Iterator[Training]:
    """Settings in the order of what they change: as it is; MLPs in tiles, heads in groups, as many layers offloaded as
    need be; then with less and less of the attention kept."""
    plain = replace(training, attention_keep=1.0, activation_offloading=0.0, tiled_mlp=0, head_groups=1)
    yield plain
    tiled = replace(plain, tiled_mlp=TILE) if training.tokens > TILE else plain
    parts = (1.0, 0.75, 0.5, 0.25, 0.0) if all(pattern.causal for pattern, _ in model.patterns) else (1.0, 0.0)
    for keep in parts if training.checkpointing else (1.0,):
        for groups in sorted({1, min(_GROUPS, max(1, model.kv_heads))}):
            part = replace(tiled, attention_keep=keep, head_groups=groups)
            yield part
            yield _offloaded(model, part, machine, taken)


def _offloaded(model: ModelSize, training: Training, machine: Machine, taken: float) -> Training:
    """With the fewest layers on the host with which the GPU has room, or as many as the host has room for."""
    chosen = training
    for layer in range(1, model.layers):
        more = replace(training, activation_offloading=layer / model.layers)
        memory = estimate_memory(model, more, machine)
        if memory.host > HOST_ROOM * machine.host_memory:
            break
        chosen = more
        if fits(memory, machine, taken):
            break
    return chosen
