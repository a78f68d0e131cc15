"""`hf-burst doctor`: what is here, what can run on it, and which schedule an example would take. Made to be pasted into
an issue."""

import argparse
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, cycle, takewhile

import torch
import torch.distributed as dist

from ..calibrate import calibrate, default_kernel, machine_for, machine_of, profile_path
from ..errors import BurstError, ConfigError
from ..kernels import KernelRequest, explain_kernels
from ..mesh import ContextGroup
from ..plan import Layer, Machine, Mask, Shapes, assign, choose, cut
from .launch import launched

_PACKAGES = (
    *("hf_burst", "torch", "transformers", "accelerate", "trl", "peft"),
    *("triton", "flash-attn", "flash-attn-4", "liger-kernel"),
)
# what a CPU goes through in some ten seconds
_MOST_RANKS = 2048
_MOST_PARTS = 2**18  # documents and ranks, of every sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--calibrate", action="store_true", help="measure kernel, memory and links, and remember them")
    example = parser.add_argument_group("the layer that the table of schedules is for")
    example.add_argument("--q-heads", type=int, default=32, help="query heads (default %(default)s)")
    example.add_argument("--kv-heads", type=int, default=8, help="key heads (default %(default)s)")
    example.add_argument("--head-dim", type=int, default=128, help="head size (default %(default)s)")
    example.add_argument("--length", type=int, default=131072, help="tokens over all ranks (default %(default)s)")
    example.add_argument("--batch", type=int, default=1, help="sequences (default %(default)s)")
    example.add_argument("--window", type=int, help="tokens that a query sees backwards (default all)")
    example.add_argument(
        "--documents",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="lengths of packed documents, again and again until the sequence is full (default one document)",
    )
    example.add_argument("--ranks", type=int, help="ranks (default those of this launch, or this host's GPUs, or 2)")
    example.add_argument("--ranks-per-host", type=int, help="ranks on one host (default as many as it has GPUs)")
    example.add_argument("--schedule", default="auto", help="a schedule to compare with the others (default auto)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report on rank 0.

    Returns:
        `int`: 0 if attention can be computed here, 1 if not.
    """
    with _launched() as (group, device):
        problems = _problems(arguments, device)
        lines: list[str] = []
        if not problems:
            ranks = arguments.ranks or (group.size if group.size > 1 else max(torch.cuda.device_count(), 2))
            try:
                machine = _machine(arguments, group, device, ranks)
                lines += _describe_machine(machine, ranks)
                lines += _describe_choice(arguments, machine, ranks, device)
            except BurstError as problem:
                problems.append(str(problem))
        if group.rank == 0:
            print("\n".join([*_describe_place(arguments, group, device), *lines, ""]))
            print("\n".join(f"Not usable: {problem}" for problem in problems) or "Usable.")
        return 1 if problems else 0


@contextmanager
def _launched() -> Iterator[tuple[ContextGroup, torch.device]]:
    """The ranks of `torchrun` or `accelerate launch`, joined for the time of the command; or this process alone."""
    size, _ = launched()
    here = int(os.environ.get("LOCAL_RANK", "0"))
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    on_gpu = torch.cuda.is_available() and here < torch.cuda.device_count() and not forced
    device = torch.device("cuda", here) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    joins = size > 1 and dist.is_available() and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ContextGroup.from_mesh(None), device
    finally:
        if joins:
            dist.destroy_process_group()


def _explained(arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, str | None]]:
    """The kernels, the fastest first, and why each cannot compute the example; `None` for those that can."""
    sizes = (arguments.head_dim, arguments.head_dim)
    return explain_kernels(KernelRequest(device.type, _dtype(device), *sizes, window=arguments.window is not None))


def _problems(arguments: argparse.Namespace, device: torch.device) -> list[str]:
    """Why attention cannot be computed here; empty if it can. The same on all ranks."""
    problems = []
    for name in ("q_heads", "kv_heads", "head_dim", "length", "batch", "ranks", "ranks_per_host"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if arguments.window is not None and arguments.window < 0:
        problems.append(f"--window is {arguments.window}; give the tokens visible backwards, or leave it out.")
    if any(size < 1 for size in arguments.documents or ()):
        problems.append(f"--documents are {arguments.documents}; give lengths of at least 1.")
    if not problems:
        problems += _too_large(arguments)
    if not problems and arguments.q_heads % arguments.kv_heads:
        problems.append(
            f"{arguments.q_heads} query heads cannot share {arguments.kv_heads} key heads: give a whole multiple."
        )
    if not dist.is_available():
        problems.append("this torch has no torch.distributed; install one that has.")
    elif device.type == "cuda" and not dist.is_nccl_available():
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
    if ranks > _MOST_RANKS:
        return [f"--ranks is {ranks}; it must be at most {_MOST_RANKS}."]
    count = len(documents) * -(-arguments.length // sum(documents))
    if arguments.batch * (count + ranks) > _MOST_PARTS:
        return [
            f"--batch {arguments.batch} times --length {arguments.length} in {count} documents over {ranks} ranks is "
            f"too much to go through; sequences times documents and ranks may be {_MOST_PARTS}. Give fewer."
        ]
    return []


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _machine(arguments: argparse.Namespace, group: ContextGroup, device: torch.device, ranks: int) -> Machine:
    """The machine of this launch, or for another number of ranks one with as many hosts as they need."""
    measured = calibrate(group, device, default_kernel(device)) if arguments.calibrate else None
    if ranks == group.size and not arguments.ranks_per_host:
        return measured or machine_for(group, device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else ranks
    per_host = arguments.ranks_per_host or (gpus if ranks % gpus == 0 else ranks)
    if ranks % per_host:
        raise ConfigError(f"{ranks} ranks do not lie on hosts of {per_host} each: give --ranks-per-host that divides.")
    return replace(measured, ranks_per_host=per_host) if measured else machine_of(device, ranks, per_host)


def _describe_place(arguments: argparse.Namespace, group: ContextGroup, device: torch.device) -> list[str]:
    """Versions, devices and kernels."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"  {name} {found}" for name in _PACKAGES if (found := _version(name))]
    lines.append(f"ranks: {group.size} in this launch, on {device}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"  cuda:{index} {name} (sm_{major}{minor}), {_gib(free)} of {_gib(total)} GiB free")
    if not torch.cuda.is_available():
        lines.append(f"  no GPU; {os.cpu_count()} processors, {torch.get_num_threads()} threads a rank")
    backends = [name for name in ("nccl", "gloo") if dist.is_available() and dist.is_backend_available(name)]
    lines.append(f"messages: {', '.join(backends) or 'none'}; {_symmetric_memory()}")
    lines.append(f"kernels for {_dtype(device)} and heads of {arguments.head_dim}, the fastest first:")
    lines += [f"  {name}: {refusal or 'can'}" for name, refusal in _explained(arguments, device)]
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _symmetric_memory() -> str:
    """Whether the GPUs of this host read each other's memory."""
    count = torch.cuda.device_count()
    if count < 2:
        return "symmetric memory needs two GPUs on a host"
    apart = [
        f"{one} and {other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    return f"GPUs {', '.join(apart)} cannot read each other's memory" if apart else "all GPUs read each other's memory"


def _describe_machine(machine: Machine, ranks: int) -> list[str]:
    """The numbers that the cost model is given."""
    path = profile_path(machine.device, machine.kernel, ranks, machine.ranks_per_host)
    measured = machine.source.startswith("measured")
    lines = [
        f"cost model: {machine.source}" + (f", {path}" if path.exists() and measured else ""),
        f"  {machine.device}, kernel {machine.kernel}, {_gib(machine.memory)} GiB at "
        f"{machine.memory_bandwidth / 1e9:.0f} GB/s, {machine.launch * 1e6:.1f} us a launch",
    ]
    rates = ", ".join(
        f"{rate.scores:.1e}: {rate.forward / 1e12:.3g} / {rate.backward / 1e12:.3g}" for rate in machine.rates
    )
    lines.append(f"  TFLOP/s forward / backward, by scores of a call: {rates}")
    links = {"symmetric": machine.symmetric, "p2p": machine.p2p, "between hosts": machine.between_hosts}
    for name, link in links.items():
        if link:
            speed = f"{link.latency * 1e6:.0f} us + {link.bandwidth / 1e9:.1f} GB/s"
            lines.append(f"  {name}: {speed}, holds up a kernel by {link.drag:.0%} of its time")
    if not measured:
        lines.append("  measure this machine: hf-burst doctor --calibrate, under torchrun or accelerate launch")
    return lines


def _describe_choice(arguments: argparse.Namespace, machine: Machine, ranks: int, device: torch.device) -> list[str]:
    """What the cost model says of the example."""
    itemsize = _dtype(device).itemsize
    shapes = Shapes(arguments.q_heads, arguments.kv_heads, arguments.head_dim, arguments.head_dim, itemsize, 4)
    ends = takewhile(lambda end: end < arguments.length, accumulate(cycle(arguments.documents or [arguments.length])))
    masks = (Mask(arguments.length, True, arguments.window, (0, *ends, arguments.length)),) * arguments.batch
    layer = Layer(masks, cut(arguments.length, assign(masks, ranks)), shapes)
    usual = None
    if arguments.documents and arguments.schedule == "auto":
        whole = (Mask(arguments.length, True, arguments.window),) * arguments.batch
        usual = choose("auto", Layer(whole, cut(arguments.length, assign(whole, ranks)), shapes), machine).route
    choice = choose(arguments.schedule, layer, machine, usual=usual)
    count = arguments.batch * (len(masks[0].documents) - 1)
    title = (
        f"a causal layer of {arguments.q_heads} query and {arguments.kv_heads} key heads of {arguments.head_dim}, "
        f"{arguments.batch} x {arguments.length} tokens in {count} document{'s'[: count - 1]} over {ranks} ranks, "
        f"{machine.ranks_per_host} a host:"
    )
    return ["", title, *(f"  {line}" for line in choice.table.splitlines())]


def _gib(size: float) -> str:
    return f"{size / 2**30:.0f}"
