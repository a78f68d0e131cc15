"""Settings that make a training step fit into memory, chosen for `BurstConfig(memory="auto")`."""

import logging
import sys
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor

from ...config import BurstConfig, Memory
from ...errors import OUT_OF_MEMORY, ConfigError
from ...kernels.ffpa import FfpaKernel
from ...layers.host_limits import share_of_host
from ...plan.layer_sizes import StepEstimate
from ...plan.memory_levels import SETTINGS, TILE, MeasuredLevels, Size, levels_for, named
from ..forward_pass import Batch, Call, Checkpoints, ForwardPass
from ..models.layer_sizes import dtype_of_states, layer_sizes, recurrent_sizes
from ..spread.value import Spread
from ..view import ModelView
from .allocator import EXPANDABLE, Reading, RoomForKernels, expand_segments
from .base import Outputs, Part
from .replicas import takes_weights_apart
from .towers import seen_in

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """A training pass since its settings were chosen."""

    rule: MeasuredLevels
    levels: tuple[Memory, ...]  # the candidates
    settings: Memory
    size: Size
    before: Reading
    alone: bool  # whether it involves no other rank
    failed: bool = False  # whether it ran out of memory

    @property
    def free(self) -> int:
        """Bytes that the step may take."""
        return self.before.room - self.before.held


class MemoryRule(Part):
    """Chooses the settings of `BurstConfig(memory="auto")` by [`MeasuredLevels`], from the memory that the GPU has left
    when a batch comes, and measures what each step takes. All ranks that share a batch or weights take the highest
    level that any of them needs, because they gather layers in the same order.
    """

    def __init__(self, config: BurstConfig) -> None:
        self.chooses = config.memory == "auto"
        self.looked: bool | None = None  # whether weights were sharded over other groups at the latest look
        self.host = 0.0  # bytes that each rank may take on its host
        self.fixed = set[str]()  # settings that some rank cannot have, so all keep the defaults
        self.rules: dict[Any, MeasuredLevels] = {}  # by how the model is trained
        self.logged = set[tuple[Memory, bool]]()  # what was logged
        self.latest: Step | None = None
        self.steps = False  # whether the latest pass was a training pass
        self.expandable = expand_segments(ask=False)
        self.room: RoomForKernels | None = None  # for a model with recurrent layers

    def choose(self, call: Call, batch: Batch, checkpoints: Checkpoints) -> Memory:
        """Returns the settings of a pass. The ranks may communicate."""
        memory, reading = call.config.memory_settings, Reading.of(call.device) if self.chooses else None
        if self.looked != bool(call.sharing) and (reading is not None or call.sharing):
            self._look(call, checkpoints)
        if reading is not None:
            self._count_errors(reading)
            memory = self._settings(call, batch, checkpoints, reading)
        if self.chooses and call.cache is not None and not memory.tiled_mlp:
            memory = replace(memory, tiled_mlp=TILE)
        return memory

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        """Registers hooks that measure the step when its backward pass has ended."""
        if self.steps and self.latest is not None:
            values = (value.own if isinstance(value, Spread) else value for value in outputs.values())
            states = [value for value in values if isinstance(value, Tensor)]
            measure = partial(self._measure, self.latest, run.device)
            engine: Any = Variable._execution_engine
            register_multi_grad_hook(states, lambda _: engine.queue_callback(measure), mode="any")

    def end(self) -> None:
        self.advise(sys.exception())

    def advise(self, problem: BaseException | None) -> None:
        """Adds advice to an out-of-memory error: the rule's next settings, or else general advice."""
        noted = any(note.startswith("hf_burst: ") for note in getattr(problem, "__notes__", ()))
        if noted or not isinstance(problem, torch.OutOfMemoryError):
            return
        step = self.latest if self.steps else None
        following = None if step is None else self._following(step)
        if step is None or following is None:
            problem.add_note(OUT_OF_MEMORY)
        elif step.alone:
            problem.add_note(f"hf_burst: run the step again, and it is trained with {named(following)}.")
        else:
            more = "" if self.expandable else f" {EXPANDABLE}"
            problem.add_note(f"hf_burst: start again with BurstConfig(memory=hf_burst.{following}).{more}")

    def remove(self, view: ModelView) -> None:
        if self.room is not None:
            self.room.end()

    def _look(self, call: Call, checkpoints: Checkpoints) -> None:
        """Finds out what all ranks can do and how much memory their hosts have. Raises on all ranks over which weights
        are sharded if their configs differ: each group would gather layers in its own order, and wait for the others
        forever."""
        self.looked = bool(call.sharing)
        impossible, own = _impossible(call, checkpoints), zlib.crc32(str(call.config).encode())
        found = [float(name in impossible) for name in SETTINGS]  # if one rank cannot, none does
        host, largest, smallest, *found = call.largest([-share_of_host(call.device), own, -own, *found])
        self.host = -host
        self.fixed = {name for name, holds in zip(SETTINGS, found, strict=True) if holds}
        if call.sharing and largest != -smallest:
            raise ConfigError(
                "Weights are sharded over ranks that were patched with different settings; this one has "
                f"{call.config}. Layers would be gathered in different orders. Give patch_model the same BurstConfig "
                "on all ranks."
            )

    def _count_errors(self, reading: Reading) -> None:
        """Tells the rule about a step that ran out of memory. Torch counts its errors, wherever one was raised and
        whoever caught it."""
        step = self.latest
        if step is not None and self.steps and reading.errors > step.before.errors:
            self._following(step)
            logger.warning(
                "The latest step ran out of memory with %s. From now on, batches of as many tokens take settings of "
                "memory='auto' that need less.",
                named(step.settings),
            )

    def _following(self, step: Step) -> Memory | None:
        """Returns the settings to try after a step that ran out of memory; `None` if no others need less."""
        if not step.failed:
            step.failed = True
            step.rule.ran_out(step.settings, step.size, step.free)
        level, _ = step.rule.choose(step.levels, step.size, step.free, self.expandable)
        return None if step.levels[level] == step.settings else step.levels[level]

    def _settings(self, call: Call, batch: Batch, checkpoints: Checkpoints, reading: Reading) -> Memory:
        """Returns the settings of a pass, the same on all ranks."""
        self.steps = call.learns
        if self.steps and self.room is None and call.view.find(recurrent_sizes):
            self.room = RoomForKernels(call.device)
            reading = Reading.of(call.device) or reading
        trained = [weight for weight in call.model.parameters() if weight.requires_grad]
        try:
            rule = self._rule(call, checkpoints, trained)
        except (AttributeError, TypeError) as problem:  # a config that names its sizes otherwise, on all ranks
            self.chooses = False
            logger.info("hf_burst cannot tell what memory a step takes, and leaves all as it is: %s", problem)
            return call.config.memory_settings
        layout, added = batch.layout, any(weight.grad is not None for weight in trained)
        size = Size(layout.batch_size * layout.sharding.most_tokens, seen_in(call), added)
        fixed = self.fixed | _impossible(call, checkpoints)
        levels = levels_for(rule.estimate, Memory(), size.tokens, self.host, fixed)
        step = Step(rule, levels, Memory(), size, reading, call.group.size == 1 and not call.sharing)
        if self.steps:
            level, expected = rule.choose(levels, size, step.free, self.expandable)
        else:
            level, expected = rule.choose_forward(levels, size, step.free), 0.0
        level = min(int(call.largest([level])[0]), len(levels) - 1)  # groups whose layers checkpoint have more levels
        chosen = levels[level]
        if not self.steps:
            return Memory(tiled_mlp=chosen.tiled_mlp, head_groups=chosen.head_groups)
        share = chosen.attention_keep
        if 0 < share < 1 and layout.beginning(1 - share) is None:  # ranks hold unequal amounts: all would be kept
            chosen = replace(chosen, attention_keep=0.0)
        step.settings, self.latest = chosen, step
        if level and not self.expandable:
            self.expandable = expand_segments()
        if call.group.rank == 0:
            self._log(f"{layout.batch_size} x {layout.length:,} tokens", step, expected)
        return chosen

    def _rule(self, call: Call, checkpoints: Checkpoints, trained: list[nn.Parameter]) -> MeasuredLevels:
        """Returns what is known of steps that train these weights."""
        key = checkpoints.count > 0, sum(weight.numel() for weight in trained)
        if key not in self.rules:
            local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
            itemsize = dtype_of_states(call.view).itemsize
            sizes = layer_sizes(call.view)
            wide = call.config.kernel in ("auto", "ffpa") and any(kind.widest_heads for kind in sizes.kinds)
            ffpa = wide and FfpaKernel().unavailable(512, 512) is None
            estimate = StepEstimate(sizes, itemsize, key[0], call.group.size > 1, ffpa)
            gradients = sum(weight.nbytes for weight in local if weight.device.type == call.device.type)
            sharded = any(isinstance(weight, DTensor) for weight in trained) * sum(part.nbytes for part in local)
            self.rules[key] = MeasuredLevels(estimate, gradients, sharded)
        return self.rules[key]

    def _measure(self, step: Step, device: torch.device) -> None:
        """Reports to the rule what a step took, after its backward pass. If several passes came before, this is what
        the last one took beyond what the others kept."""
        reading = Reading.of(device)
        if reading is not None and step is self.latest and not step.failed:
            exact = reading.most > step.before.most  # else something took more before the step
            step.rule.measured(step.settings, step.size, reading.most - step.before.held, exact)

    def _log(self, given: str, step: Step, expected: float) -> None:
        """Logs what was chosen, or that nothing fits."""
        short = expected > step.free
        if (step.settings, short) in self.logged or not (short or step.settings != Memory()):
            return
        self.logged.add((step.settings, short))
        if short:
            logger.warning(
                "A training step of %s may run out of memory: it takes about %.1f GiB with %s, and %.1f are left of "
                "each GPU. Shard the sequence over more GPUs, shorten it, give fewer images, train adapters (LoRA), or "
                "set gradient_checkpointing=True.%s",
                *(given, expected / 2**30, named(step.settings), step.free / 2**30),
                "" if self.expandable else f" {EXPANDABLE}",
            )
        else:
            logger.info("hf_burst trains %s with %s", given, named(step.settings))


def _impossible(call: Call, found: Checkpoints) -> set[str]:
    """Returns settings that the model cannot have now. A trainer may wrap or checkpoint it differently later."""
    apart, checkpoints = takes_weights_apart(call.view), found.count > 0
    fixed = {
        "tiled_mlp": apart,
        "layers_per_checkpoint": apart or (checkpoints and not found.repeatable),
        "activation_offloading": call.compiled,
    }
    return {name for name, impossible in fixed.items() if impossible}
