"""Settings that make a training step fit into memory, chosen for `BurstConfig(memory="auto")`."""

import logging
import os
import sys
import zlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...config import BurstConfig, Memory
from ...errors import OUT_OF_MEMORY, ConfigError
from ...layers.host_limits import share_of_host
from ...plan.memory_levels import GAPS, GAPS_EXPANDABLE, SETTINGS, TILE, TUNING, MeasuredLevels, Size
from ..forward_pass import Batch, Call, Checkpoints, ForwardPass
from ..models.hybrid import recurrent_sizes
from ..models.layer_sizes import dtype_of_states, layer_sizes
from ..sharded_cache import ShardedCache
from ..spread.value import Spread
from ..view import ModelView
from .base import Part
from .replicas import takes_weights_apart
from .towers import seen_in

logger = logging.getLogger(__name__)

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPAND = "expandable_segments:True"
_EXPANDABLE = (
    "Set PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts: the gaps that torch's allocator leaves are "
    "then smaller, and longer sequences fit."
)


class Reading(NamedTuple):
    """The state of torch's allocator on a GPU: bytes, and how often it ran out of memory."""

    held: int
    most: int
    room: int  # most that it may hold
    errors: int

    @classmethod
    def of(cls, device: torch.device) -> "Reading | None":
        """Returns the reading of a device; `None` if the device counts none."""
        if device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        room = min(total * torch.cuda.get_per_process_memory_fraction(device), free + reserved)
        held, most = (stats.get(f"allocated_bytes.all.{name}", 0) for name in ("current", "peak"))
        return cls(held, most, int(room), stats.get("num_ooms", 0))


@dataclass
class Step:
    """A training pass since its settings were chosen."""

    rule: MeasuredLevels
    levels: tuple[Memory, ...]  # the candidates
    settings: Memory
    size: Size
    before: Reading
    added: bool  # whether there were gradients before
    ends: bool = False  # whether its backward pass has begun
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
        self.compared = False  # whether all ranks have this config
        self.looked: bool | None = None  # whether weights were sharded over other groups at the latest look
        self.host: float | None = None  # bytes that each rank may take on its host
        self.fixed = set[str]()  # settings that some rank cannot have, so all keep the defaults
        self.rules: dict[Any, MeasuredLevels] = {}  # by how the model is trained
        self.logged = set[tuple[Memory, bool]]()  # what was logged
        self.latest: Step | None = None
        self.steps = False  # whether the latest pass was a training pass
        self.alone = True  # whether it involved no other rank
        self.expandable = _EXPAND in _asked()  # whether the allocator has expandable segments
        self.room: RoomForKernels | None = None  # for a model with recurrent layers

    def choose(self, call: Call, batch: Batch, checkpoints: Checkpoints) -> Memory:
        """Returns the settings of a pass. The ranks may communicate."""
        self._compare(call)
        memory, reading = call.config.memory_settings, Reading.of(call.device) if self.chooses else None
        if reading is not None:
            self._count_errors(reading)
            memory = self._settings(call, batch, checkpoints, reading)
        if self.chooses and isinstance(call.cache, ShardedCache) and not memory.tiled_mlp:
            memory = replace(memory, tiled_mlp=TILE)
        return memory

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        """Registers hooks that measure the step when its backward pass has ended."""
        if not self.steps or self.latest is None:
            return
        hook = partial(self._begin_backward, self.latest, run.device)
        for value in outputs.values():
            states = value.own if isinstance(value, Spread) else value
            if isinstance(states, Tensor) and states.requires_grad:
                states.register_hook(hook)

    def end(self) -> None:
        self.advise(sys.exception())

    def advise(self, problem: BaseException | None) -> None:
        """Adds advice to an out-of-memory error: the rule's next settings, or else general advice."""
        if not isinstance(problem, torch.OutOfMemoryError):
            return
        if any(note.startswith("hf_burst: ") for note in getattr(problem, "__notes__", ())):
            return
        following = self._following(self.latest) if self.steps and self.latest is not None else None
        if following is None:
            problem.add_note(OUT_OF_MEMORY)
        elif self.alone:
            problem.add_note(f"hf_burst: run the step again, and it is trained with {named(following)}.")
        else:
            settings = ", ".join(f"{name}={value!r}" for name, value in asdict(following).items())
            more = "" if self.expandable else f" {_EXPANDABLE}"
            problem.add_note(f"hf_burst: start again with BurstConfig(memory=hf_burst.Memory({settings})).{more}")

    def remove(self, view: ModelView) -> None:
        if self.room is not None:
            self.room.end()

    def _compare(self, call: Call) -> None:
        """Raises on all ranks over which weights are sharded if their configs differ: each group would gather layers in
        its own order, and wait for the others forever."""
        if self.compared or not call.sharing:
            return
        self.compared = True
        own = zlib.crc32(str(call.config).encode())
        largest, smallest = call.largest([own, -own])
        if largest != -smallest:
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
        level, _ = step.rule.choose(step.levels, step.size, step.free, self._gaps, step.added)
        return None if step.levels[level] == step.settings else step.levels[level]

    def _settings(self, call: Call, batch: Batch, checkpoints: Checkpoints, reading: Reading) -> Memory:
        """Returns the settings of a pass, the same on all ranks."""
        self.steps = call.learns
        self.alone = call.group.size == 1 and not call.sharing
        if self.looked != bool(call.sharing):  # weights are sharded over other groups by now, or no more
            self.looked = bool(call.sharing)
            self._look(call, checkpoints)
        if self.steps and self.room is None and call.view.find(recurrent_sizes):
            self.room = RoomForKernels(call.device)
            reading = Reading.of(call.device) or reading
        weights = {id(weight): weight for module in call.view.modules for weight in module._parameters.values()}
        trained = [weight for weight in weights.values() if weight is not None and weight.requires_grad]
        try:
            rule = self._rule(call, checkpoints, trained)
        except (AttributeError, TypeError) as problem:  # a config that names its sizes otherwise, on all ranks
            self.chooses = False
            logger.info("hf_burst cannot tell what memory a step takes, and leaves all as it is: %s", problem)
            return call.config.memory_settings
        layout = batch.layout
        size = Size(layout.batch_size * layout.sharding.most_tokens, seen_in(call))
        levels = rule.sizes.levels(size.tokens, self.host or 0.0, self.fixed | _impossible(call, checkpoints))
        step = Step(rule, levels, Memory(), size, reading, any(weight.grad is not None for weight in trained))
        if not self.steps:
            level = int(call.largest([rule.choose_forward(levels, size, step.free)])[0])
            chosen = levels[min(level, len(levels) - 1)]
            return Memory(tiled_mlp=chosen.tiled_mlp, head_groups=chosen.head_groups)
        level, expected = rule.choose(levels, size, step.free, self._gaps, step.added)
        level = int(call.largest([level])[0])
        step.settings = levels[min(level, len(levels) - 1)]  # another group may have more: its layers checkpoint
        self.latest = step
        share = step.settings.attention_keep
        if 0 < share < 1 and layout.beginning(1 - share) is None:  # ranks hold unequal amounts of a part
            step.settings = replace(step.settings, attention_keep=0.0)
        if level and not self.expandable:
            self.expandable = expand_segments()
        if call.group.rank == 0:
            self._log(call, batch, step, expected)
        return step.settings

    def _look(self, call: Call, checkpoints: Checkpoints) -> None:
        """Finds out, once, what all ranks can do and how much memory their hosts have."""
        impossible = [
            float(name in _impossible(call, checkpoints)) for name in SETTINGS
        ]  # if one rank cannot, none does
        host, *impossible = call.largest([-share_of_host(call.device), *impossible])
        self.host = -host
        self.fixed = {name for name, found in zip(SETTINGS, impossible, strict=True) if found}

    def _rule(self, call: Call, checkpoints: Checkpoints, trained: list[nn.Parameter]) -> MeasuredLevels:
        """Returns what is known of steps that train these weights."""
        checkpointing = checkpoints.count > 0
        key = checkpointing, sum(weight.numel() for weight in trained)
        if key not in self.rules:
            local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
            sizes = layer_sizes(call.view, dtype_of_states(call.view).itemsize, checkpointing, call.group.size)
            sharded = any(isinstance(weight, DTensor) for weight in trained)
            gradients = sum(weight.nbytes for weight in local if weight.device.type == call.device.type)
            self.rules[key] = MeasuredLevels(sizes, gradients, sharded)
        return self.rules[key]

    @property
    def _gaps(self) -> tuple[float, float]:
        return GAPS_EXPANDABLE if self.expandable else GAPS

    def _begin_backward(self, step: Step, device: torch.device, gradient: Tensor) -> None:
        if not step.ends:
            step.ends = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._measure, step, device))

    def _measure(self, step: Step, device: torch.device) -> None:
        """Reports to the rule what a step took, after its backward pass. If several passes came before, this is what
        the last one took beyond what the others kept."""
        reading = Reading.of(device)
        if reading is not None and step is self.latest and not step.failed:
            exact = reading.most > step.before.most  # else something took more before the step
            step.rule.measured(step.settings, step.size, reading.most - step.before.held, exact, step.added)

    def _log(self, call: Call, batch: Batch, step: Step, expected: float) -> None:
        """Logs what was chosen, or that nothing fits."""
        short = expected > step.free
        if (step.settings, short) in self.logged or not (short or step.settings != Memory()):
            return
        self.logged.add((step.settings, short))
        layout = batch.layout
        given = f"{layout.batch_size} x {layout.length:,} tokens"
        if not short:
            logger.info("hf_burst trains %s with %s", given, named(step.settings))
            return
        logger.warning(
            "A training step of %s may run out of memory: it takes about %.1f GiB with %s, and %.1f are left of each "
            "GPU, for about %s tokens. Shard the sequence over more GPUs, train adapters (LoRA),%s or%s shorten it.",
            *(given, expected / 2**30, named(step.settings), step.free / 2**30),
            f"{int(layout.batch_size * layout.length * step.free / expected):,}",
            " give fewer or smaller images," if step.size.seen else "",
            "" if step.rule.sizes.checkpointing else " set gradient_checkpointing=True, or",
        )
        if not self.expandable:
            logger.info(_EXPANDABLE)


class RoomForKernels:
    """GPU memory that torch's allocator leaves to the driver until `end`, for Triton kernels that spill registers while
    they are tuned. The allocator keeps what was freed, and returns nothing when others ask."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, torch.cuda.get_per_process_memory_fraction(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        self.share = min(self.before, max(0.0, 1 - (others + TUNING) / total))
        torch.cuda.set_per_process_memory_fraction(self.share, device)

    def end(self) -> None:
        """Restores the allocator's share, unless somebody has set it since."""
        if abs(torch.cuda.get_per_process_memory_fraction(self.device) - self.share) < 1e-6:  # torch counts bytes
            torch.cuda.set_per_process_memory_fraction(self.before, self.device)


def _impossible(call: Call, found: Checkpoints) -> set[str]:
    """Returns settings that the model cannot have now. A trainer may wrap or checkpoint it differently later."""
    apart, checkpoints = takes_weights_apart(call.view), found.count > 0
    fixed = {
        "tiled_mlp": apart,
        "layers_per_checkpoint": apart or (checkpoints and not found.repeatable),
        "activation_offloading": call.compiled,
    }
    return {name for name, impossible in fixed.items() if impossible}


def expand_segments() -> bool:
    """Asks torch's allocator for expandable segments, unless the user has configured them: a step that needs other
    settings has no memory to lose in gaps. Returns whether the allocator has them."""
    given = _asked()
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None or not torch.cuda.is_initialized() or "expandable_segments" in given or "backend" in given:
        return _EXPAND in given
    change(f"{given},{_EXPAND}".lstrip(","))
    return True


def _asked() -> str:
    """Returns the allocator settings that the user has chosen."""
    return next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")


def named(settings: Memory) -> str:
    """Returns the settings that differ from the defaults, as written in a config."""
    changed = {name: value for name, value in asdict(settings).items() if value != getattr(Memory(), name)}
    return ", ".join(f"{name}={value:g}" for name, value in changed.items()) or "nothing changed"
