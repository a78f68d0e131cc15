"""Which settings let a training fit into memory and take the least time: tiles, groups of heads, offloading, and
attention that is computed again."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ..config import BurstConfig
from .machine import Machine
from .memory import MemoryEstimate, estimate_memory
from .model import ModelSize, Training
from .step import StepEstimate, estimate_step

ROOM = 0.92  # of a GPU's memory; the rest is for the allocator, NCCL and what CUDA itself takes
HOST_ROOM = 0.85  # of the memory that its host has for it; data loaders and caches need some, too
TILE = 16384  # tokens of a tile: products of matrices run at full speed, and little is there of it
# of BurstConfig
SETTINGS = ("tiled_mlp", "head_groups", "activation_offloading", "layers_per_checkpoint", "attention_keep")
KEEPS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of causal attention
_CHECKPOINTS = (1, 2, 4)  # layers that share one; more of them keep little less, and compute as much again
_GROUPS = (1, 4, 8)  # of the heads: less and less of what attention needs inside, and calls that are long enough
_STEP = 1024  # tokens by which lengths differ


def keeps_of(model: ModelSize) -> tuple[float, ...]:
    """The shares of its attention that a model can keep: an encoder all or nothing."""
    return KEEPS if all(pattern.causal for pattern, _ in model.patterns) else (1.0, 0.0)


class Fit(NamedTuple):
    """Settings, and what a step with them is predicted to take."""

    training: Training
    step: StepEstimate
    memory: MemoryEstimate
    fits: bool


def fits(memory: MemoryEstimate, machine: Machine, held: float | None = None) -> bool:
    """Whether a GPU has room for it, and its host for what is offloaded. `held` are bytes of weights, of the
    optimizer and of all else that stays from step to step, if they are known better than by the estimate."""
    total = memory.total if held is None else memory.total - memory.held + held
    return total <= ROOM * machine.memory and memory.host <= HOST_ROOM * machine.host_memory


def fit(
    model: ModelSize,
    training: Training,
    machine: Machine,
    fixed: Collection[str] = (),
    keeps: Sequence[float] = KEEPS,
    held: float | None = None,
) -> Fit:
    """The settings with which a step fits and takes the least time, or those that take the least memory if none fits.

    Args:
        model ([`ModelSize`]): What is trained.
        training ([`Training`]): How. Its [`SETTINGS`] are chosen.
        machine ([`Machine`]): On what.
        fixed (collection of `str`): Settings that stay as they are.
        keeps (sequence of `float`): What `attention_keep` may become.
        held (`float`, *optional*): As in [`fits`].
    """
    candidates = dict.fromkeys(_candidates(model, training, machine, fixed, keeps, held))
    estimates = [(how, estimate_memory(model, how, machine)) for how in candidates]
    able = [(how, memory) for how, memory in estimates if fits(memory, machine, held)]
    least = min(estimates, key=lambda entry: (entry[1].host > HOST_ROOM * machine.host_memory, entry[1].total))
    rows = [Fit(how, estimate_step(model, how, machine), memory, bool(able)) for how, memory in able or [least]]
    return min(rows, key=lambda row: row.step.total_s)  # the first of equals, which changes the least


def longest(
    model: ModelSize,
    training: Training,
    machine: Machine,
    fixed: Collection[str] = (),
    keeps: Sequence[float] = KEEPS,
    held: float | None = None,
) -> int:
    """Tokens of the longest sequence that fits, to 1,024 tokens a GPU; 0 if none does. Arguments as in [`fit`]."""
    unit = _STEP * training.burst_size

    def has_room(units: int) -> bool:
        longer = replace(training, length=units * unit, documents=())
        return fit(model, longer, machine, fixed, keeps, held).fits

    low, high = 0, 1
    while high < 2**20 and has_room(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low * unit


def _candidates(
    model: ModelSize,
    training: Training,
    machine: Machine,
    fixed: Collection[str],
    keeps: Sequence[float],
    held: float | None,
) -> Iterator[Training]:
    """Settings in the order of what they change: as it is; MLPs in tiles, heads in groups, as many layers offloaded as
    need be, fewer inputs of layers kept; then with less and less of the attention kept."""
    stays = {name: getattr(training, name) for name in fixed}
    defaults = BurstConfig()
    plain = replace(training, **{name: getattr(defaults, name) for name in SETTINGS})
    yield replace(plain, **stays)
    tile = TILE if training.tokens > TILE else 0
    for keep in keeps if training.checkpointing else (1.0,):
        for groups, layers in product(sorted({min(count, max(1, model.kv_heads)) for count in _GROUPS}), _CHECKPOINTS):
            changed = {"tiled_mlp": tile, "head_groups": groups, "layers_per_checkpoint": layers}
            part = replace(plain, **{**changed, "attention_keep": keep, **stays})
            yield part
            if "activation_offloading" not in fixed:
                yield _offloaded(model, part, machine, held)


def _offloaded(model: ModelSize, training: Training, machine: Machine, held: float | None) -> Training:
    """With the fewest layers on the host with which the GPU has room, or as many as the host has room for."""
    chosen = training
    for layer in range(1, model.layers if training.checkpointing else 1):
        more = replace(training, activation_offloading=layer / model.layers)
        memory = estimate_memory(model, more, machine)
        if memory.host > HOST_ROOM * machine.host_memory:
            break
        chosen = more
        if fits(memory, machine, held):
            break
    return chosen
