"""A GPU with so many bytes, for models on CPUs: what it has left, and what steps take of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from hf_burst.config import Memory
from hf_burst.hf.models.layer_sizes import layer_sizes
from hf_burst.hf.parts import memory
from hf_burst.hf.parts.allocator import Reading
from hf_burst.hf.parts.memory import MemoryRule, Step
from hf_burst.hf.view import ModelView
from hf_burst.plan import memory_levels
from hf_burst.plan.layer_sizes import StepEstimate
from hf_burst.plan.memory_levels import FIRST, MeasuredLevels, Size, levels_for
from tests.support.trainers import small_pages

HOST = 2**30


def as_estimated(step: Step) -> float:
    """What a step takes if the estimate is right."""
    return step.rule.gradients + step.size.tokens * step.rule.estimate.bytes_of_token(step.settings)


class SmallGpu:
    """What ranks are told of their GPU.

    Args:
        room (`float`): Its bytes.
        takes (callable): The bytes that a step takes.
    """

    def __init__(self, room: float, takes: Callable[[Step], float]) -> None:
        self.room, self.takes, self.held, self.most, self.errors = room, takes, 0.0, 0.0, 0

    def reading(self, device: Any) -> Reading:
        return Reading(int(self.held), int(self.most), int(self.room), self.errors)


@contextmanager
def small_gpu(room: float, takes: Callable[[Step], float] = as_estimated) -> Iterator[SmallGpu]:
    """As if ranks ran on such GPUs, where tiles of a short sequence have 5 tokens."""
    gpu, measure = SmallGpu(room, takes), MemoryRule._measure

    def measured(part: MemoryRule, step: Step, device: Any) -> None:
        gpu.most = step.before.held + gpu.takes(step)
        measure(part, step, device)
        gpu.most = 0.0

    with ExitStack() as stack:
        for patch in (
            small_pages(),
            mock.patch.multiple(memory_levels, SHORT_TILE=5),
            mock.patch.object(Reading, "of", gpu.reading),
            mock.patch.object(MemoryRule, "_measure", measured),
            mock.patch.object(memory, "share_of_host", return_value=HOST),
        ):
            stack.enter_context(patch)
        yield gpu


def room_for(level: int, model: Any, tokens: int, ranks: int = 1, groups: int = 1) -> float:
    """Bytes of a GPU on which a first batch with so many tokens, shared by ranks, is given this level and no earlier
    one; of several groups of ranks, which shard weights."""
    estimate = StepEstimate(layer_sizes(ModelView(model)), model.dtype.itemsize, True, ranks > 1)
    learns = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    # FSDP2 has gathered those outside of layers by then
    shards = {name: ranks * groups if groups > 1 and "layers." in name else 1 for name in learns}
    gradients = sum(-(-len(weight) // shards[name]) * weight[0].nbytes for name, weight in learns.items())
    with mock.patch.multiple(memory_levels, SHORT_TILE=5):
        size = Size(-(-tokens // ranks))
        levels = levels_for(estimate, Memory(), size.tokens, HOST)
    plain, need = (FIRST * size.tokens * estimate.bytes_of_token(levels[index]) for index in (0, level))
    assert level == 0 or need < plain
    room = need + gradients + 1
    assert MeasuredLevels(estimate, gradients, groups > 1).choose(levels, size, room)[0] == level
    return room
