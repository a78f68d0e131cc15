"""Settings that let a training step fit into memory, chosen for `BurstConfig(memory="auto")`."""

import logging
import os
import sys
import zlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...config import BurstConfig, Memory
from ...errors import OUT_OF_MEMORY, BurstError, ConfigError
from ...layers.host_limits import processes, share_of_host
from ...sizing.gpus import Capacity
from ...sizing.memory import TUNING, outside_of_torch
from ...sizing.memory_rule import SETTINGS, Fit, at_level, bucket, fit, longest
from ...sizing.model import ModelSize, Training
from ..forward_pass import Agreement, Batch, Call, Checkpoints
from ..models.model_size import model_size
from ..sharded_cache import ShardedCache
from ..view import ModelView
from .base import Part
from .optimizers import bytes_to_come
from .replicas import takes_weights_apart
from .towers import Seen, learns, seen_in

logger = logging.getLogger(__name__)

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PROMPT_TILE = 16384  # tokens of a prompt that an MLP takes at a time
_EXPANDABLE = (
    "Set PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts: the gaps that torch's allocator leaves are "
    "then smaller, and longer sequences fit."
)


class MemoryRule(Part):
    """Chooses the settings of `BurstConfig(memory="auto")`, by the rule of `sizing/memory_rule.py`, from what the GPUs
    of all ranks hold when the first batch comes. Batches of similar lengths, and with as many tokens of images, have
    the same settings.

    Where weights are sharded over several groups, layers must be gathered in the same order in all of them. So all of
    these ranks take the highest level of the rule that one of them needs.
    """

    def __init__(self, model: PreTrainedModel, config: BurstConfig) -> None:
        self.model_class = type(model)  # FSDP2 changes it
        self.fixed = set[str]()  # settings that some rank cannot have, and so stay at their defaults
        self.chooses = config.memory == "auto"
        self.compared = False  # whether all ranks have this config
        self.size: ModelSize | None = None
        self.held = 0.0  # bytes of the fullest GPU that do not follow from the batch
        self.capacity = Capacity(0)  # of the smallest GPU and the smallest host; known with the size
        # by how the model is trained, with how many tokens at most, by what is fixed, and by the least level
        self.chosen: dict[tuple[Training, frozenset[str], int], Fit] = {}
        self.told = set[tuple[int, int]]()  # of which the log has read: tokens and level
        self.least = dict[int, int]()  # the lowest level that did not run out of memory, by tokens
        self.latest: tuple[Training, Fit] | None = None  # of the latest step: how it is trained, and what was chosen
        self.expandable = False  # whether the allocators of all ranks have expandable segments
        self.room: RoomForKernels | None = None  # of a model with recurrent layers
        self.steps = False  # whether the latest pass was one of training
        self.short = 0  # how often the allocator had run out of memory before it
        self.seen: Seen | None = None  # what the batch of the pass has for towers
        self.unknown = False  # whether the log has said that a tower cannot be counted

    def admit(self, call: Call, agreement: Agreement) -> None:
        self.seen = seen_in(call) if self.chooses and call.learns else None

    def choose(self, call: Call, batch: Batch, checkpoints: Checkpoints) -> Memory:
        """The settings of a pass. The ranks may communicate."""
        self._compare(call)
        memory = call.config.memory_settings
        if not self.chooses:
            return memory
        self._count_errors(call)
        self.steps = call.learns
        if self.steps:
            memory = self._settings(call, batch, checkpoints)
        elif self.chosen:  # an evaluation is to take no more than training
            most = max(self.chosen.values(), key=lambda choice: choice.level).training
            memory = Memory(tiled_mlp=most.tiled_mlp, head_groups=most.head_groups)
        if isinstance(call.cache, ShardedCache) and not memory.tiled_mlp:
            memory = replace(memory, tiled_mlp=_PROMPT_TILE)
        return memory

    def end(self) -> None:
        self.advise(sys.exception())

    def advise(self, problem: BaseException | None) -> None:
        """Adds to an error of memory that was short what follows by the rule, or what else can be turned."""
        if not isinstance(problem, torch.OutOfMemoryError):
            return
        if any(note.startswith("hf_burst: ") for note in getattr(problem, "__notes__", ())):
            return
        if self.latest is None or self.size is None or not self.steps:
            problem.add_note(OUT_OF_MEMORY)
            return
        training, choice = self.latest
        after = fit(self.size, choice.training, self.capacity, self.fixed, self.held, choice.level + 1)
        if after.settings == choice.settings:
            problem.add_note(OUT_OF_MEMORY)
        elif training.gpus == 1:
            problem.add_note(f"hf_burst: run the step again, and it is trained with {named(after)}.")
        else:
            settings = ", ".join(f"{name}={value!r}" for name, value in after.settings.items())
            more = "" if training.expandable_segments else f" {_EXPANDABLE}"
            problem.add_note(f"hf_burst: start again with BurstConfig(memory=hf_burst.Memory({settings})).{more}")

    def _compare(self, call: Call) -> None:
        """Raises on all ranks over which weights are sharded if some of them have another config: each group would
        gather layers in an order of its own, and wait for the others for ever."""
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

    def _settings(self, call: Call, batch: Batch, checkpoints: Checkpoints) -> Memory:
        if self.size is None:
            self._look(call, checkpoints)
        if self.size is None:
            return call.config.memory_settings
        tokens = bucket(batch.layout.batch_size * batch.layout.length)
        training = replace(
            training_of(call, batch, checkpoints, self.size), length=tokens, expandable_segments=self.expandable
        )
        training = self._with_images(call, training, self.size)
        fixed = frozenset(self.fixed | _impossible(call, checkpoints))
        least = max((level for known, level in self.least.items() if known <= tokens), default=0)
        choice = self.chosen.get((training, fixed, least))
        if choice is None:
            choice = fit(self.size, training, self.capacity, fixed, self.held, least)
            self.chosen[training, fixed, least] = choice
        if call.sharing and (level := int(call.largest([choice.level])[0])) != choice.level:
            choice = at_level(self.size, training, self.capacity, fixed, self.held, level)
        if (tokens, choice.level) not in self.told:
            self.told.add((tokens, choice.level))
            self._tell(call, batch, choice)
        self.latest = training, choice
        settings = choice.settings
        if 0 < settings["attention_keep"] < 1 and batch.layout.beginning(1 - settings["attention_keep"]) is None:
            settings["attention_keep"] = 0.0  # ranks do not hold as much of each part
        return Memory(**settings)

    def _with_images(self, call: Call, training: Training, size: ModelSize) -> Training:
        """How a batch with images is trained. As one image, of which the rank with the most encodes its part."""
        if self.seen is None:
            return training
        if self.seen.sound or not self.seen.tokens or size.tower is None:
            self._tell_unknown(call)
        if not self.seen.tokens:
            return training
        return replace(
            training,
            images=1,
            image_tokens=bucket(self.seen.tokens),
            encoded_tokens=bucket(self.seen.encoded if size.tower is None or size.tower.dealt else self.seen.tokens),
            frozen_towers=not learns(call.model.base_model, ()),
        )

    def _tell_unknown(self, call: Call) -> None:
        """Says once that there may be too little room for a tower."""
        if self.unknown or call.group.rank:
            return
        self.unknown = True
        logger.warning(
            "memory='auto' cannot tell what towers of %s take for the images or the sound of this batch, and leaves no "
            "room for it. If a step runs out of memory, set gradient_checkpointing=True and BurstConfig(memory="
            "hf_burst.Memory(activation_offloading=1.0, tiled_mlp=4096)), or give fewer or smaller ones a batch.",
            self.model_class.__name__,
        )

    def _look(self, call: Call, checkpoints: Checkpoints) -> None:
        """Finds out, once, what the step has for itself on all ranks."""
        own = held_bytes(call.model, call.device)
        if own is None:
            self.chooses = False
            return
        smallest = [-gpu_memory(call.device), -share_of_host(call.device), -processes()]
        impossible = [
            float(name in _impossible(call, checkpoints)) for name in SETTINGS
        ]  # what one rank cannot do, none does
        limits = [own, *smallest, not expandable_segments(), *impossible]
        self.held, gpu, host, per_host, gaps, *impossible = call.largest(limits)
        self.expandable = not gaps
        self.capacity = Capacity(int(-gpu), int(-host), int(-per_host), on_gpu=call.device.type == "cuda")
        self.fixed = {name for name, found in zip(SETTINGS, impossible, strict=True) if found}
        try:
            self.size = model_size(self.model_class, call.model.config)
        except BurstError as problem:
            self.chooses = False
            logger.info("hf_burst cannot tell what memory a step takes, and leaves all as it is: %s", problem)
            return
        if self.size.recurrent:
            self.room = RoomForKernels(call.device)

    def remove(self, view: ModelView) -> None:
        if self.room is not None:
            self.room.end()

    def _count_errors(self, call: Call) -> None:
        """In one process: if the latest step ran out of memory, batches of as many tokens, or more, begin one level
        higher. Torch counts its errors, wherever one was raised and whoever caught it. Over ranks such a step ends the
        job."""
        short = out_of_memory(call.device)
        if self.latest is not None and self.steps and short > self.short and call.group.size == 1 and not call.sharing:
            training, choice = self.latest
            self.least[training.length] = choice.level + 1
            logger.warning(
                "The latest step ran out of memory with %s. From now on, batches of as many tokens take the next "
                "settings of memory='auto'.",
                named(choice),
            )
        self.short = short

    def _tell(self, call: Call, batch: Batch, choice: Fit) -> None:
        """Says what was chosen, or that nothing fits."""
        if call.group.rank or not choice.level:
            return
        assert self.size is not None, "looked at"
        layout = batch.layout
        tokens = layout.batch_size * layout.length
        seen = f", {self.seen.tokens:,} of them of images," if self.seen is not None and self.seen.tokens else ""
        what, needs = (
            f"{layout.batch_size} x {layout.length:,} tokens{seen}",
            described(choice, self.capacity.gpu_memory),
        )
        exactly = fit(self.size, replace(choice.training, length=tokens), self.capacity, SETTINGS, self.held)
        if not exactly.fits:
            most = longest(self.size, choice.training, self.capacity, self.fixed, self.held)
            logger.warning(
                "A training step of %s may run out of memory: it is predicted to take %s with %s. %s tokens fit. "
                "Shard the sequence over more GPUs, train adapters (LoRA),%s or%s shorten it.",
                *(what, needs, named(choice), f"{most:,}"),
                " give fewer or smaller images," if seen else "",
                "" if choice.training.checkpointing else " set gradient_checkpointing=True, or",
            )
        else:
            logger.info("hf_burst trains %s with %s: predicted are %s", what, named(choice), needs)
        if not choice.training.expandable_segments:
            logger.info(_EXPANDABLE)


class RoomForKernels:
    """Memory of a GPU that torch's allocator leaves to the driver, until it ends: for kernels of Triton that spill
    registers while they are tuned. The allocator keeps what was freed, and gives nothing back where others ask."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, torch.cuda.get_per_process_memory_fraction(device)
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        self.share = min(self.before, max(0.0, 1 - (others + TUNING) / total))
        torch.cuda.set_per_process_memory_fraction(self.share, device)

    def end(self) -> None:
        """Gives the allocator what it had, unless somebody has set it since."""
        if abs(torch.cuda.get_per_process_memory_fraction(self.device) - self.share) < 1e-6:  # torch counts bytes
            torch.cuda.set_per_process_memory_fraction(self.before, self.device)


def _impossible(call: Call, found: Checkpoints) -> set[str]:
    """The settings that the model cannot have as it is by now. A trainer may wrap or checkpoint it otherwise later."""
    apart, checkpoints = takes_weights_apart(call.view), found.layers > 0
    fixed = {
        "tiled_mlp": apart,
        "layers_per_checkpoint": apart or (checkpoints and not found.repeatable),
        "activation_offloading": call.compiled,
    }
    return {name for name, impossible in fixed.items() if impossible}


def gpu_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may take."""
    total, share = torch.cuda.mem_get_info(device)[1], torch.cuda.get_per_process_memory_fraction(device)
    return int(total * share)


def held_bytes(model: PreTrainedModel, device: torch.device) -> float | None:
    """Bytes of a GPU that do not follow from the batch: tensors that are there before the first one, states of an
    optimizer that are still to come, and what others take of it beyond CUDA and NCCL, which the plan counts. `None` for
    devices whose memory is not counted."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    others = total - free - torch.cuda.memory_reserved(device) - outside_of_torch(ranks)
    return float(torch.cuda.memory_allocated(device) + max(0.0, others) + bytes_to_come(model, device))


def out_of_memory(device: torch.device) -> int:
    """How often torch's allocator has run out of a device's memory so far."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def expandable_segments() -> bool:
    """Whether torch's allocator was asked for expandable segments."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _ALLOCATOR)


def training_of(call: Call, batch: Batch, checkpoints: Checkpoints, size: ModelSize) -> Training:
    """How a model is trained, as far as a forward pass shows it."""
    rows, length = batch.layout.batch_size, batch.layout.length
    weights = list(call.model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)  # whole, also under ZeRO-3
    whole = count > size.weights / 2 or len(trained) == len(weights)
    lora = 0 if whole else max(1, round(count / max(1, size.adapted)))
    quantised = lora and any(type(weight).__name__ == "Params4bit" for weight in weights)
    wide = any(weight.dtype == torch.float32 for weight in trained)
    modules = (getattr(module.forward, "__module__", "") for module in call.view.modules)
    return Training(
        length=rows * length,  # as one document, whose exchange takes the most
        gpus=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        burst_size=call.group.size,
        sharded="fsdp2"
        if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in weights)
        else "ddp",
        weights="4bit" if quantised else "fp32" if wide else "bf16",
        lora=lora,
        checkpointing=checkpoints.layers > 0,
        fused=any(name.startswith("liger_kernel.") for name in modules),
        expandable_segments=expandable_segments(),
        **{name: getattr(call.config.memory_settings, name) for name in SETTINGS},
    )


def named(choice: Fit) -> str:
    """What it changes, as it reads in a config."""
    defaults = Memory()
    changed: dict[str, Any] = {
        name: value for name, value in choice.settings.items() if value != getattr(defaults, name)
    }
    return ", ".join(f"{name}={value:g}" for name, value in changed.items()) or "nothing changed"


def described(choice: Fit, memory: int) -> str:
    """What a step is predicted to take."""
    host = f" and {choice.memory.host / 2**30:.1f} GiB of its host" if choice.memory.host else ""
    return f"{choice.memory.total / 2**30:.1f} of {memory / 2**30:.0f} GiB of a GPU{host}"
