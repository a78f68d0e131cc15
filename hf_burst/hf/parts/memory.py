"""Settings that let a training step fit into memory, chosen where the config names none."""

import logging
import os
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...config import BurstConfig
from ...errors import OUT_OF_MEMORY, BurstError
from ...host_memory import host_memory
from ...plan import SETTINGS, Fit, ModelSize, Training, fit, keeps_of, longest
from ...resources import resources_of
from ..model_size import model_size
from .base import ForwardPass, Part
from .tiles import takes_weights_apart

logger = logging.getLogger(__name__)
Keeps = tuple[float, ...]

_ADAM = 2  # numbers of an optimizer for each weight


class Memory(Part):
    """Chooses, for every size of a batch that is trained on, what `BurstConfig(memory="auto")` leaves open: by the
    plan, from what the GPUs of all ranks hold when the first batch comes."""

    def __init__(self, model: PreTrainedModel, config: BurstConfig) -> None:
        self.model_class = type(model)  # FSDP2 changes it
        defaults = {setting.name: setting.default for setting in fields(BurstConfig)}
        self.fixed = [name for name in SETTINGS if getattr(config, name) != defaults[name]]
        self.chooses = config.memory == "auto" and len(self.fixed) < len(SETTINGS)
        self.size: ModelSize | None = None
        self.held: float | None = None
        self.host = 0  # bytes of host memory that each process may take
        self.compiled: float = 0  # whether any rank is
        self.chosen: dict[tuple[Training, Keeps], BurstConfig] = {}

    def begin(self, run: ForwardPass) -> None:
        if not self.chooses:
            return
        if run.model.training and torch.is_grad_enabled():
            run.settings = self._settings(run)
        elif self.chosen:  # an evaluation is to take no more than training
            latest = [*self.chosen.values()][-1]
            run.settings = replace(run.config, tiled_mlp=latest.tiled_mlp, head_groups=latest.head_groups)
        run.call = replace(run.call, config=run.settings)

    def _settings(self, run: ForwardPass) -> BurstConfig:
        if self.held is None:
            own = held_bytes(run.model, run.device)
            if own is None:
                self.chooses = False
                return run.config
            available = host_memory()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            apart = takes_weights_apart(run.model)
            # what one rank cannot do, none does
            limits = [own, -available, apart, apart or not run.repeatable, run.compiled]
            self.held, host, tiles, once, self.compiled = _most(limits, run)
            self.host = int(-host)
            kept = ["tiled_mlp"] * int(tiles) + ["layers_per_checkpoint"] * int(once)
            kept += ["activation_offloading"] * int(self.compiled)
            self.fixed = list(dict.fromkeys([*self.fixed, *kept]))
            try:
                self.size = model_size(self.model_class, run.model.config)
            except BurstError as problem:
                self.chooses = False
                logger.info("hf_burst cannot tell what memory a step takes, and leaves all as it is: %s", problem)
        if self.size is None:
            return run.config
        training, keeps = _training_of(run, self.size), _keeps(run, self.size, bool(self.compiled))
        if (training, keeps) not in self.chosen:
            self.chosen[training, keeps] = self._choose(run, self.size, training, keeps)
        return self.chosen[training, keeps]

    def _choose(self, run: ForwardPass, size: ModelSize, training: Training, keeps: Keeps) -> BurstConfig:
        known = resources_of(run.group).machine(run.device, run.config.kernel, run.config.ranks_per_host)
        machine = replace(known, host_memory=min(self.host, known.host_memory))
        choice = fit(size, training, machine, self.fixed, keeps, self.held)
        settings = {name: getattr(choice.training, name) for name in SETTINGS}
        if run.group.rank == 0:
            batch = f"{run.layout.batch_size} x {run.layout.length:,} tokens"
            changed = {name: value for name, value in settings.items() if value != getattr(run.config, name)}
            named = ", ".join(f"{name}={value:g}" for name, value in changed.items())
            needs = _described(choice, self.held or 0.0, machine.memory)
            if not choice.fits:
                most = longest(size, training, machine, self.fixed, keeps, self.held)
                logger.warning(
                    "A training step of %s may run out of memory: it is predicted to take %s with %s. %s tokens fit. "
                    "Shard the sequence over more GPUs, train adapters (LoRA), or%s shorten it.",
                    *(batch, needs, named or "what is named", f"{most:,}"),
                    "" if training.checkpointing else " set gradient_checkpointing=True, or",
                )
            elif changed:
                logger.info("hf_burst trains %s with %s: predicted are %s", batch, named, needs)
        return replace(run.config, **settings)


def _keeps(run: ForwardPass, size: ModelSize, compiled: bool) -> Keeps:
    """The shares of attention that can be kept of a batch: parts, if every rank has as much of them."""
    parts = [keep for keep in keeps_of(size) if 0 < keep < 1]
    even = [keep for keep in parts if not compiled and run.layout.beginning(1 - keep) is not None]
    return (1.0, *even, 0.0)


def advise_on_memory(problem: BaseException | None) -> None:
    """Adds to an error of memory that was short what can be turned."""
    if isinstance(problem, torch.OutOfMemoryError) and OUT_OF_MEMORY not in getattr(problem, "__notes__", ()):
        problem.add_note(OUT_OF_MEMORY)


def held_bytes(model: PreTrainedModel, device: torch.device) -> float | None:
    """Bytes of a GPU that do not follow from the batch: all that it holds before the first one, and an optimizer like
    Adam that is still to come. `None` for devices whose memory is not counted."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device) + torch.cuda.memory_allocated(device)
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
    return float(taken + _ADAM * sum(weight.nbytes for weight in local if weight.device == device))


def _most(numbers: list[float], run: ForwardPass) -> list[float]:
    """The largest of all ranks' numbers."""
    if run.group.size == 1:
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.float64, device=run.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=run.group.process_group)
    most: list[float] = tensor.tolist()
    return most


def _training_of(run: ForwardPass, size: ModelSize) -> Training:
    """How a model is trained, as far as a forward pass shows it."""
    rows, length = run.layout.batch_size, run.layout.length
    weights = list(run.model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    count = sum(weight.numel() for weight in trained)
    lora = 0 if count > size.weights / 2 else max(1, round(count / max(1, size.adapted)))
    quantised = lora and any(type(weight).__name__ == "Params4bit" for weight in weights)
    wide = any(weight.dtype == torch.float32 for weight in trained)
    modules = (getattr(module.forward, "__module__", "") for module in run.model.modules())
    return Training(
        length=rows * length,  # as one document, whose exchange takes the most
        gpus=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        burst_size=run.group.size,
        sharded="fsdp2" if any(isinstance(weight, DTensor) for weight in weights) else "ddp",
        weights="4bit" if quantised else "fp32" if wide else "bf16",
        lora=lora,
        checkpointing=run.facts["activation checkpointing"] is not None,
        attention_keep=run.config.attention_keep,
        activation_offloading=run.config.activation_offloading,
        layers_per_checkpoint=run.config.layers_per_checkpoint,
        tiled_mlp=run.config.tiled_mlp,
        head_groups=run.config.head_groups,
        fused=any(name.startswith("liger_kernel.") for name in modules),
    )


def _described(choice: Fit, held: float, memory: int) -> str:
    total = choice.memory.total - choice.memory.held + held
    host = f" and {choice.memory.host / 2**30:.1f} GiB of its host" if choice.memory.host else ""
    return f"{total / 2**30:.1f} of {memory / 2**30:.0f} GiB of a GPU{host}"
