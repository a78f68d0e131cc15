"""`hf-burst plan --model`: how long a training step takes, how the GPUs are best divided, and what memory it takes."""

import argparse
from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

import torch

from ..config import Memory
from ..errors import ConfigError, ShardingError
from ..plan import (
    DATA_SHEETS,
    HOST_ROOM,
    SETTINGS,
    SHAPES,
    Fit,
    Machine,
    ModelSize,
    StepEstimate,
    Training,
    estimate_step,
    fit,
    longest,
    name_of,
    named,
)
from ..plan.model import Sharded, Weights
from ..ring.calibrate import machine_of
from .recurrence import describe_laid_out

_HELP = f"a name on the hub, a folder or config.json of a model, a class of Transformers, or one of {', '.join(SHAPES)}"
_PRECISION = {
    "bf16": "assumed: trained weights in bf16; accelerate's mixed_precision=bf16 keeps them in fp32 (--weights fp32)",
    "fp32": "assumed: trained weights in fp32, as accelerate's mixed_precision=bf16 keeps them (else --weights bf16)",
    "4bit": "assumed: adapters in fp32, as peft makes them; TRL's trainers hold them in bf16, which takes less",
}
_LEGEND = (
    "burst_size GPUs share a sequence; each group has one of its own. MFU: share of the GPU's peak. GiB: the most of a",
    "step. schedule: how the GPUs of a group exchange attention (docs/schedules.md). settings: of hf_burst.Memory.",
)
_PARTS = ("attention_s", "recurrence_s", "products_s", "elementwise_s", "exchange_s", "host_s", "optimizer_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a training run."""
    group = parser.add_argument_group("how long the steps of a training take, and whether it fits (--model)")
    group.add_argument("--model", help=_HELP)
    group.add_argument("--gpus", type=int, help="(default those of this host, or 8)")
    machine = f"{', '.join(DATA_SHEETS)} (default the GPUs of this host, or h200)"
    group.add_argument("--machine", help=machine)
    group.add_argument("--gpus-per-host", type=int, help="(default as many as this host has, or 8)")
    adapters = group.add_mutually_exclusive_group()
    rank: dict[str, Any] = {"type": int, "nargs": "?", "const": 16, "metavar": "RANK"}
    adapters.add_argument("--lora", **rank, help="adapters (rank 16 by default)")
    adapters.add_argument("--qlora", **rank, help="adapters on frozen weights of 4 bits")
    group.add_argument("--weights", choices=("bf16", "fp32"), help="those that train (default bf16; for --qlora fp32)")
    group.add_argument("--sharded", choices=get_args(Sharded), default="fsdp2", help="(default %(default)s)")
    group.add_argument(
        "--host-memory", type=float, help="GiB of host memory for each GPU (default this host's, or 128)"
    )
    chosen = "as in hf_burst.Memory (default: by the rule of memory='auto')"
    for name in SETTINGS:
        kind = type(getattr(Memory, name))
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=chosen)
    group.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="keep all activations")
    expandable = "torch's allocator has PYTORCH_ALLOC_CONF=expandable_segments:True, as recipes set it"
    group.add_argument("--expandable-segments", action="store_true", help=expandable)
    plain = "norms, rotary positions and SwiGLU without Liger"
    group.add_argument("--plain-kernels", dest="fused", action="store_false", help=plain)
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(arguments: argparse.Namespace, documents: tuple[int, ...], length: int) -> int:
    """Prints what is predicted; the exit status is 0 if it fits, 1 if not. Raises for what cannot be, which is 2."""
    rank = arguments.lora if arguments.qlora is None else arguments.qlora
    if rank is not None and rank < 1:
        option = "--lora" if arguments.qlora is None else "--qlora"
        raise ConfigError(f"{option} is {rank}; give the rank of the adapters, at least 1.")
    if arguments.qlora is not None and arguments.weights == "bf16":
        raise ConfigError("--qlora has adapters in fp32. Leave out --weights bf16.")
    machine, gpus = find_machine(arguments)
    model = find_model(arguments.model, arguments.trust_remote_code)
    weights: Weights = "4bit" if arguments.qlora else arguments.weights or "bf16"
    options = {name: getattr(arguments, name) for name in ("sharded", "checkpointing", "fused", "expandable_segments")}
    settings = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    training = Training(length, gpus, gpus, documents, weights=weights, lora=rank or 0, **options, **settings)
    rows = divisions(model, training, machine, settings)
    fitting = [row for row in rows if row.fit.fits]
    best = max(fitting, key=lambda row: row.step.tokens_per_second, default=None)
    lines = _table(model, machine, rows, best)
    if not documents[2:]:
        most = longest(model, rows[0].fit.training, machine, settings)
        lines.append(f"Longest sequence that fits: {most:,} tokens, on all GPUs.")
    print("\n".join(lines))
    return 0 if best else 1


def find_model(name: str, trust_remote_code: bool) -> ModelSize:
    """The sizes of a model by its config."""
    from ..check.run import find_target  # which takes seconds to import
    from ..hf.models.model_size import model_size, shape_named

    try:
        target = find_target(shape_named(name) or name, trust_remote_code)
    except ConfigError as problem:
        near = "".join(f" Did you mean {match}?" for match in get_close_matches(name.lower(), SHAPES, n=1))
        raise ConfigError(f"{problem}{near} Shapes that need no hub: {', '.join(SHAPES)}.") from problem
    return model_size(target.model_class, target.config, name)


def find_machine(arguments: argparse.Namespace) -> tuple[Machine, int]:
    """The machine that is named, or this one, or H200s; and the number of GPUs."""
    here = torch.cuda.device_count()
    gpus = (here or 8) if arguments.gpus is None else arguments.gpus
    per_host = arguments.gpus_per_host
    if per_host is None:
        per_host = here if here and not arguments.machine else 8
    if min(gpus, per_host) < 1:
        raise ConfigError(f"--gpus is {gpus} and --gpus-per-host {per_host}; give at least 1.")
    if gpus > per_host and gpus % per_host:
        raise ConfigError(f"{gpus} GPUs do not lie on hosts of {per_host} each: give --gpus-per-host that divides.")
    if arguments.machine or not here:
        machine = replace(named(arguments.machine or "h200"), ranks_per_host=per_host)
    else:
        machine = machine_of(torch.device("cuda", 0), gpus, min(per_host, gpus))
    if arguments.host_memory is not None:
        if not 0 <= arguments.host_memory < 2**30:
            raise ConfigError(f"--host-memory is {arguments.host_memory}; give the GiB of a host for each of its GPUs.")
        machine = replace(machine, host_memory=int(arguments.host_memory * 2**30))
    return machine, gpus


class Division(NamedTuple):
    """One way to divide the GPUs into groups, the settings that the rule takes for it, and its seconds."""

    fit: Fit
    step: StepEstimate


def divisions(model: ModelSize, training: Training, machine: Machine, fixed: Collection[str]) -> list[Division]:
    """All ways to divide the GPUs into groups that share a sequence, the largest groups first, with what they cost:
    each with the settings of the rule, beside those that are `fixed`."""
    rows = []
    for size in range(training.gpus, 0, -1):
        if training.gpus % size == 0:
            divided = replace(training, burst_size=size)
            try:
                chosen = fit(model, divided, machine, fixed)
                rows.append(Division(chosen, estimate_step(model, chosen.training, machine)))
            except ShardingError:  # too short for so many
                continue
    if not rows:
        raise ConfigError(f"--length {training.length} is too short for any of {training.gpus} GPUs.")
    return rows


def _table(model: ModelSize, machine: Machine, rows: list[Division], best: Division | None) -> list[str]:
    """What is predicted, in lines."""
    training, room = rows[0].fit.training, machine.memory / 2**30
    spread = training.sharded if training.shards > 1 else "ddp"
    what = f"all {training.weights}"
    if training.lora:
        base = "4bit" if training.weights == "4bit" else "bf16"
        what = f"{'bf16' if training.weights == 'bf16' else 'fp32'} adapters of rank {training.lora} on {base}"
    again = "layers checkpointed" if training.checkpointing else "nothing checkpointed"
    cells = [
        ["burst_size x groups", "seconds a step", "tokens/s a GPU", "MFU", "GiB a GPU", "schedule", "settings", ""]
    ]
    for row in rows:
        (_, how, memory, able), step = row
        cells.append([_division(how), f"{step.total_s:.2f}"])
        cells[-1] += [f"{step.tokens_per_second:,.0f}", f"{step.mfu(machine):.0%}", f"{memory.total / 2**30:.1f}"]
        cells[-1] += [_schedule(how, step), _settings(how)]
        cells[-1] += ["fastest that fits" if row is best else "" if able else "does not fit"]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    (_, how, memory, _), step = best or rows[0]
    shared = rows[0] if how.burst_size == 1 else (best or rows[0])
    seconds = {name.removesuffix("_s"): value for name, value in vars(step).items() if name.endswith("_s")}
    offloaded = f"{memory.host / 2**30:.2f} of the {machine.host_memory / 2**30:.0f} of its host"
    lines = [
        str(model),
        f"{training.gpus} x {machine.device}, {room:.0f} GiB; {machine.source}",
        f"{training.length:,} tokens a sequence, {what} weights, AdamW, {spread}, {again}",
        _PRECISION[training.weights],
        "",
        *("  ".join(map(str.rjust, line, widths)).rstrip() for line in cells),
        *_LEGEND,
        *(_reasons(rows, best, machine) if best else ()),
        *describe_laid_out(shared.step.laid, shared.fit.training.burst_size),
        "",
        f"burst_size {how.burst_size}, seconds: {_listed(seconds, 1.0)}",
        f"GiB, the most in {memory.moment}: {_listed(memory.items, 2**30)}" + (f"; {offloaded}" if memory.host else ""),
    ]
    if best is None:
        host = f"{HOST_ROOM:.0%} of the host's {machine.host_memory / 2**30:.0f}"
        limits = f"{room:.0f} GiB and {host}"
        less = "" if training.weights == "4bit" else " or --qlora" if training.lora else " or --lora"
        lines.append(f"None fits into {limits}. Give more --gpus, fewer tokens{less}.")
    return lines


def _settings(training: Training) -> str:
    """Which settings of its memory differ from the defaults."""
    named, defaults = {name: getattr(training, name) for name in SETTINGS}, Memory()
    return ", ".join(f"{name}={own:g}" for name, own in named.items() if own != getattr(defaults, name)) or "as it is"


def _schedule(training: Training, step: StepEstimate) -> str:
    """How attention is spread, and what recurrent layers exchange."""
    if training.burst_size == 1:
        return "-"
    ways = [name_of(step.schedule, training.burst_size)] if step.schedule else []
    return ", ".join(ways + ([step.laid.choice.way] if step.laid.choice else []))


def _division(training: Training) -> str:
    return f"{training.burst_size} x {training.gpus // training.burst_size}"


def _reasons(rows: list[Division], best: Division, machine: Machine) -> list[str]:
    """Why the best division is not another one, in lines."""
    ours, lines = best.step, []
    for (_, how, memory, able), step in (row for row in rows if row is not best):
        change = f"{abs(step.tokens_per_second / ours.tokens_per_second - 1):.1%}"
        if not able:
            needs, room = memory.total / 2**30, machine.memory / 2**30
            lines.append(f"Not {_division(how)}: it needs {needs:.1f} GiB of {room:.0f}.")
        else:
            losses = {name: vars(step)[name] / step.tokens - vars(ours)[name] / ours.tokens for name in _PARTS}
            part = max(losses, key=losses.__getitem__).removesuffix("_s")
            lines.append(f"Not {_division(how)}: {change} fewer tokens/s, lost most in {part}.")
    return lines


def _listed(values: dict[str, float], unit: float) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value / unit:.2f}" for name, value in values.items() if value)
