"""`hf-burst doctor`: versions, devices, kernels, and the schedule of an example, to be pasted into an issue."""

import argparse
import os
import platform
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, cycle, takewhile

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ..config import Schedule
from ..errors import BurstError, ConfigError
from ..kernels import KernelRequest, explain_kernels
from ..plan import (
    DATA_SHEETS,
    Cut,
    Hybrid,
    Layer,
    Machine,
    Mask,
    Segments,
    Shapes,
    assign,
    candidates,
    choose,
    cut,
    cuts,
    estimate,
    name_of,
    named,
)
from ..ranks.group import ContextGroup
from ..ring.calibrate import machine_for, machine_of, profile_path, reaches_peers
from ..sizing.model import ModelSize
from ..version import __version__
from . import hosts
from .launch import backend_of, device_here, joined, launched
from .plan import find_model
from .recurrence import describe_cuts, describe_ways, table
from .tokens import tokens

_HUGGING_FACE = ("transformers", "accelerate", "trl", "peft")
_PACKAGES = ("torch", *_HUGGING_FACE, "triton", "flash-attn", "flash-attn-4", "liger-kernel")
# a CPU goes through so many in some ten seconds
_MOST_RANKS = 2048
_MOST_PARTS = 2**18  # documents and ranks, of every sequence


_ELSEWHERE = (
    "",
    "This CPU runs everything, to try things out. For GPUs that are elsewhere:",
    "  hf-burst plan --model llama-3-8b --length 128k --gpus 8 --machine h200   seconds and memory of a training step",
    "  hf-burst doctor --machine h200 --ranks 8                                 schedules of one attention layer",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    example = parser.add_argument_group("the layer that the table of schedules is for")
    example.add_argument("--q-heads", type=int, default=32, help="query heads (default %(default)s)")
    example.add_argument("--kv-heads", type=int, default=8, help="key heads (default %(default)s)")
    example.add_argument("--head-dim", type=int, default=128, help="head size (default %(default)s)")
    hybrid = "take the heads of a model, and show its recurrent layers: any that hf-burst plan takes"
    example.add_argument("--model", help=hybrid)
    example.add_argument(
        "--length", type=tokens, default=131072, help="tokens over all ranks, such as 128k or 1M (default %(default)s)"
    )
    example.add_argument("--batch", type=int, default=1, help="sequences (default %(default)s)")
    example.add_argument("--window", type=tokens, help="tokens that a query sees backwards (default all)")
    documents = "lengths of packed documents, again and again until the sequence is full (default one document)"
    example.add_argument("--documents", type=tokens, nargs="+", metavar="TOKENS", help=documents)
    example.add_argument("--ranks", type=int, help="ranks (default those of this launch, or this host's GPUs, or 2)")
    example.add_argument("--ranks-per-host", type=int, help="ranks on one host (default as many as it has GPUs)")
    machine = f"predict for another machine: {', '.join(DATA_SHEETS)} (default this one)"
    example.add_argument("--machine", help=machine)
    example.add_argument("--schedule", default="auto", help="a schedule to compare with the others (default auto)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report on rank 0; the exit status is 0 if attention can be computed here, 1 if not."""
    size, rank = launched()
    store = None
    if size > 1 and not dist.is_initialized():
        store = next(rendezvous("env://"))[0]
        if _blocked(rank, size, store):
            return 1
    with joined(store) as (group, device):
        problems = _problems(arguments, device)
        lines: list[str] = []
        if not problems and not torch.cuda.is_available() and group.size == 1 and not _asked_for(arguments):
            lines += _ELSEWHERE
        elif not problems:
            ranks = arguments.ranks or (group.size if group.size > 1 else max(torch.cuda.device_count(), 2))
            try:
                machine = _machine(arguments, group, device, ranks)
                lines += describe_machine(machine, ranks)
                if not arguments.machine and not machine.source.startswith("measured"):
                    lines.append("  measure this machine: hf-burst calibrate, under torchrun or accelerate launch")
                lines += _describe_choice(arguments, machine, ranks, device)
            except BurstError as problem:
                problems.append(str(problem))
        if group.rank == 0:
            print("\n".join([*_describe_place(arguments, group, device), *lines, ""]))
            print("\n".join(f"Not usable: {problem}" for problem in problems) or "Usable.")
        return 1 if problems else 0


def _blocked(rank: int, size: int, store: Store) -> bool:
    """Whether the ranks cannot connect; what is misconfigured is printed on rank 0."""
    reports, took = hosts.gather(hosts.report(backend_of(device_here())), rank, size, store)
    found = hosts.findings(reports, took)
    if rank == 0:
        kinds = ((finding, "Not usable" if finding.blocks else "Check") for finding in found)
        said = [f"{kind}: {finding.text}" for finding, kind in kinds]
        print("\n".join([hosts.describe(reports), *said, ""]), flush=True)
    return any(finding.blocks for finding in found)


def _asked_for(arguments: argparse.Namespace) -> bool:
    """Whether an option was given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return any(getattr(arguments, name) != value for name, value in vars(parser.parse_args([])).items())


def _explained(arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, str | None]]:
    """The kernels, the fastest first, each with the reason why it cannot compute the example, or `None`."""
    sizes = (arguments.head_dim, arguments.head_dim)
    return explain_kernels(KernelRequest(device.type, _dtype(device), *sizes, window=arguments.window is not None))


def _problems(arguments: argparse.Namespace, device: torch.device) -> list[str]:
    """Why attention cannot be computed here; empty if it can. The same on all ranks."""
    problems = []
    for name in ("q_heads", "kv_heads", "head_dim", "length", "batch", "ranks", "ranks_per_host"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if any(size < 1 for size in arguments.documents or ()):
        problems.append(f"--documents are {arguments.documents}; give lengths of at least 1.")
    if not problems:
        problems += _too_large(arguments)
    if not problems and arguments.q_heads % arguments.kv_heads:
        shared = f"{arguments.q_heads} query heads cannot share {arguments.kv_heads} key heads"
        problems.append(f"{shared}: give a whole multiple.")
    if device.type == "cuda" and not dist.is_nccl_available():
        problems.append("this torch has GPUs and no NCCL; install a CUDA build of torch, or set ACCELERATE_USE_CPU=1.")
    if not problems:
        refusals = _explained(arguments, device)
        if all(refusal for _, refusal in refusals):
            why = "; ".join(f"{name} {refusal}" for name, refusal in refusals)
            problems.append(f"no kernel computes {_dtype(device)} on {device.type}: {why}. Take another --head-dim.")
    return problems


def _too_large(arguments: argparse.Namespace) -> list[str]:
    """Why the example would take minutes to go through; empty if it does not."""
    documents, ranks = arguments.documents or [arguments.length], arguments.ranks or 1
    count = len(documents) * -(-arguments.length // sum(documents))
    if ranks <= _MOST_RANKS and arguments.batch * (count + ranks) <= _MOST_PARTS:
        return []
    return [
        f"--batch {arguments.batch} times --length {arguments.length} in {count} documents over {ranks} ranks is too "
        f"much to go through; ranks may be {_MOST_RANKS}, sequences x (documents + ranks) {_MOST_PARTS}. Give fewer."
    ]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _machine(arguments: argparse.Namespace, group: ContextGroup, device: torch.device, ranks: int) -> Machine:
    """The machine that is named, that of this launch, or for another number of ranks one with as many hosts."""
    if arguments.machine:
        per_host = arguments.ranks_per_host or min(ranks, 8)
        _check_hosts(ranks, per_host)
        return replace(named(arguments.machine), ranks_per_host=per_host)
    if ranks == group.size and not arguments.ranks_per_host:
        return machine_for(group, device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else ranks
    per_host = arguments.ranks_per_host or (gpus if ranks % gpus == 0 else ranks)
    _check_hosts(ranks, per_host)
    return machine_of(device, ranks, per_host)


def _check_hosts(ranks: int, per_host: int) -> None:
    """Raises if hosts of this size do not divide the ranks."""
    if ranks % per_host:
        raise ConfigError(f"{ranks} ranks do not lie on hosts of {per_host} each: give --ranks-per-host that divides.")


def _describe_place(arguments: argparse.Namespace, group: ContextGroup, device: torch.device) -> list[str]:
    """Versions, devices and kernels."""
    lines, versions = [f"Python {platform.python_version()} on {platform.platform()}"], [f"hf_burst {__version__}"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    lines.append(f"  {', '.join(versions)}")
    lines.append(f"ranks: {group.size} in this launch, on {device}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"  cuda:{index} {name} (sm_{major}{minor}), {_gib(free)} of {_gib(total)} GiB free")
    if not torch.cuda.is_available():
        lines.append(f"  no GPU; {os.cpu_count()} processors, {torch.get_num_threads()} threads a rank")
    backends = [name for name in ("nccl", "gloo") if dist.is_backend_available(name)]
    lines.append(f"messages: {', '.join(backends)}")
    if device.type == "cuda":
        reach = "reads" if reaches_peers(device) else "does not read"
        lines[-1] += f"; rank 0 {reach} the memory of other GPUs of its host"
    lines.append(f"kernels for {_dtype(device)} and heads of {arguments.head_dim}, the fastest first:")
    kernels: dict[str, list[str]] = {}
    for name, refusal in sorted(_explained(arguments, device), key=lambda kernel: kernel[1] is not None):
        kernels.setdefault(refusal or "can", []).append(name)
    return [*lines, *(f"  {answer}: {', '.join(names)}" for answer, names in kernels.items())]


def describe_machine(machine: Machine, ranks: int) -> list[str]:
    """The numbers from which seconds are predicted, in lines."""
    path = profile_path(machine.device, machine.kernel, ranks, machine.ranks_per_host)
    measured = machine.source.startswith("measured")
    lines = [
        f"cost model: {machine.source}" + (f", {path}" if path.exists() and measured else ""),
        f"  {machine.device}, kernel {machine.kernel}, {_gib(machine.memory)} GiB at "
        f"{machine.memory_bandwidth / 1e9:.0f} GB/s, {machine.launch * 1e6:.1f} us a launch",
    ]
    lines.append(f"  products of matrices: {machine.products / 1e12:.3g} TFLOP/s")
    rates = [f"{rate.scores:.1e}: {rate.forward / 1e12:.3g} / {rate.backward / 1e12:.3g}" for rate in machine.rates]
    lines.append(f"  TFLOP/s forward / backward, by scores of a call: {', '.join(rates)}")
    links = {"symmetric": machine.symmetric, "p2p": machine.p2p, "between hosts": machine.between_hosts}
    for name, link in links.items():
        if link:
            speed = f"{link.latency * 1e6:.0f} us + {link.bandwidth / 1e9:.1f} GB/s"
            lines.append(f"  {name}: {speed}, holds up a kernel by {link.drag:.0%} of its time")
    return lines


def _describe_choice(arguments: argparse.Namespace, machine: Machine, ranks: int, device: torch.device) -> list[str]:
    """The schedule of the example and why, and what is predicted of every schedule that the ranks can run."""
    model = find_model(arguments.model, False) if arguments.model else None
    itemsize = 2 if machine.peak else _dtype(device).itemsize
    shapes = Shapes(arguments.q_heads, arguments.kv_heads, arguments.head_dim, arguments.head_dim, itemsize, 4)
    if model:
        shapes = Shapes(model.q_heads, model.kv_heads, model.head_dim, model.value_dim, itemsize, 4)
    ends = takewhile(lambda end: end < arguments.length, accumulate(cycle(arguments.documents or [arguments.length])))
    documents = (0, *ends, arguments.length)
    masks = (Mask(arguments.length, True, arguments.window, documents),) * arguments.batch
    lines: list[str] = []
    if model and model.recurrent and ranks > 1:
        taken, lines = _describe_recurrent(model, shapes, (documents,) * arguments.batch, machine, ranks)
        sharding = taken.sharding
    else:
        sharding = cut(arguments.length, assign(masks, ranks))
    if model and not model.patterns:
        return lines
    return [*_describe_attention(arguments, Layer(masks, sharding, shapes), machine), *lines]


def _describe_attention(arguments: argparse.Namespace, layer: Layer, machine: Machine) -> list[str]:
    """The schedules of a layer."""
    ranks, shapes = layer.ranks, layer.shapes
    q_heads, kv_heads = shapes.q_heads, shapes.kv_heads
    taken, reason = _asked(arguments.schedule, ranks, q_heads, kv_heads), "asked for"
    if taken is None:
        choice = choose(layer, machine)
        taken, reason = choice.schedule, choice.reason
    count = arguments.batch * (len(layer.masks[0].documents) - 1)
    title = (
        f"a causal layer of {q_heads} query and {kv_heads} key heads of {shapes.head_dim}, {arguments.batch} x "
        f"{arguments.length} tokens in {count} document{'s'[: count - 1]} over {ranks} ranks, "
        f"{machine.ranks_per_host} a host takes {name_of(taken, ranks)}: {reason}"
    )
    return ["", title, "predicted:", *(f"  {line}" for line in _predicted(layer, machine, taken))]


def _describe_recurrent(
    model: ModelSize, shapes: Shapes, documents: tuple[tuple[int, ...], ...], machine: Machine, ranks: int
) -> tuple[Cut, list[str]]:
    """The cut that a model with recurrent layers takes, and what it is compared with."""
    patterns = tuple((pattern, max(1, round(count))) for pattern, count in model.patterns)
    hybrid = Hybrid(model.recurrent, shapes if patterns else None, machine)
    priced = cuts(documents, patterns, ranks, hybrid)
    taken = min(priced, key=lambda one: one.total_s)
    way = taken.recurrence.way
    lines = ["", f"{model}", f"cut {taken.chunking}; {taken.recurrence.reason}", "all layers of a cut:"]
    lines += [f"  {line}" for line in describe_cuts(priced, taken)]
    ways = describe_ways(model.recurrent, Segments(taken.sharding, documents), machine, way)
    return taken, [*lines, "one recurrent layer:", *(f"  {line}" for line in ways)]


def _asked(name: str, ranks: int, q_heads: int, kv_heads: int) -> Schedule | None:
    """The schedule of a name, which the ranks can run; `None` for `"auto"`. One rank exchanges nothing."""
    if name == "auto":
        return None
    schedule = Schedule.parse(name, ranks)
    problem = schedule.refusal(ranks, q_heads, kv_heads)
    if ranks > 1 and problem:
        raise ConfigError(f"The schedule {name!r} cannot run: {problem}. Name another one, or leave --schedule out.")
    return schedule if ranks > 1 else Schedule()


def _predicted(layer: Layer, machine: Machine, taken: Schedule) -> list[str]:
    """A table with one line for every schedule, the one taken first, then the fastest."""
    heads, ranks = (layer.shapes.q_heads, layer.shapes.kv_heads), layer.ranks
    schedules = dict.fromkeys([taken, *candidates(ranks, *heads, machine.ranks_per_host)])
    costs = {schedule: estimate(schedule, layer, machine) for schedule in schedules}
    rows = [["schedule", "forward", "backward", "total", "exposed", "sent", "memory", "by", "slices", ""]]
    across = ranks > machine.ranks_per_host
    if across:
        rows[0].insert(6, "between hosts")
    for schedule in sorted(costs, key=lambda schedule: (schedule != taken, costs[schedule].total_s)):
        cost = costs[schedule]
        times = (cost.forward_s, cost.backward_s, cost.total_s, cost.exposed_s)
        sizes = [f"{cost.sent_bytes / 1e6:.1f} MB", f"{cost.memory_bytes / 2**20:.0f} MiB"]
        if across:
            sizes.insert(1, f"{cost.across_bytes / 1e6:.1f} MB")
        ratio = f"{cost.total_s / costs[taken].total_s:.2f}x"
        rows.append([name_of(schedule, ranks), *map(_time, times), *sizes])
        rows[-1] += [cost.transport if ranks > 1 else "-", str(cost.slices), "taken" if schedule == taken else ratio]
    return table(rows)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _gib(size: float) -> str:
    return f"{size / 2**30:.0f}"
