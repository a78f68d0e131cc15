"""`hf-burst doctor`: versions, devices, kernels, and what is misconfigured on hosts, to be pasted into an issue."""

import argparse
import os
import platform

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ..kernels import KernelRequest, explain_kernels
from ..ranks.group import ContextGroup
from . import hosts
from .launch import backend_of, device_here, joined, launched

_ELSEWHERE = (
    "",
    "This CPU runs everything, to try things out. For GPUs that are elsewhere:",
    "  hf-burst plan --model llama-3-8b --length 128k --gpus 8 --machine h200   seconds and memory of a training step",
    "  hf-burst layout --ranks 8 --length 128k                                  which rank computes what",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--head-dim", type=int, default=128, help="head size for the kernels (default %(default)s)")
    parser.epilog = "Start it under torchrun or accelerate launch to check the hosts of a launch."


def run(arguments: argparse.Namespace) -> int:
    """Prints the report on rank 0; the exit status is 0 if attention can be computed here, 1 if not."""
    size, rank = launched()
    store = None
    if size > 1 and not dist.is_initialized():
        store = next(rendezvous("env://"))[0]
        if _blocked(rank, size, store):
            return 1
    with joined(store) as (group, device):
        lines = _describe_place(group, device)
        kernels, problem = _kernels(arguments.head_dim, device)
        if device.type == "cuda" and not dist.is_nccl_available():
            problem = "this torch has GPUs and no NCCL; install a CUDA build of torch, or set ACCELERATE_USE_CPU=1."
        lines += kernels
        if not problem and not torch.cuda.is_available() and group.size == 1:
            lines += _ELSEWHERE
        if group.rank == 0:
            print("\n".join([*lines, "", f"Not usable: {problem}" if problem else "Usable."]))
        return 1 if problem else 0


def _blocked(rank: int, size: int, store: Store) -> bool:
    """Whether the ranks cannot connect; what is misconfigured is printed on rank 0."""
    reports = hosts.gather(hosts.report(backend_of(device_here())), rank, size, store)
    found = hosts.findings(reports)
    if rank == 0:
        said = [f"{'Not usable' if finding.blocks else 'Check'}: {finding.text}" for finding in found]
        print("\n".join([hosts.describe(reports), *said, ""]), flush=True)
    return any(finding.blocks for finding in found)


def _describe_place(group: ContextGroup, device: torch.device) -> list[str]:
    """Versions, devices and the environment."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines.append(f"  {', '.join(f'{name} {version}' for name, version in hosts.versions().items())}")
    lines.append(f"ranks: {group.size} in this launch, on {device}")
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
        lines.append(f"  cuda:{index} {name}, {free:.0f} of {total:.0f} GiB free")
    if not torch.cuda.is_available():
        lines.append(f"  no GPU; {os.cpu_count()} processors, {torch.get_num_threads()} threads a rank")
    lines.append(f"messages: {', '.join(name for name in ('nccl', 'gloo') if dist.is_backend_available(name))}")
    settings = " ".join(f"{name}={value}" for name, value in hosts.variables().items())
    return [*lines, f"environment: {settings or 'nothing is set'}"]


def _kernels(head_dim: int, device: torch.device) -> tuple[list[str], str]:
    """The kernels that can compute such heads, and why others cannot; and the problem if none can."""
    if head_dim < 1:
        return [], f"--head-dim is {head_dim}; it must be at least 1."
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    explained = explain_kernels(KernelRequest(device.type, dtype, head_dim, head_dim))
    names: dict[str, list[str]] = {"can": []}
    for name, refusal in explained:
        names.setdefault(refusal or "can", []).append(name)
    problem = ""
    if not names["can"]:
        why = "; ".join(f"{name} {refusal}" for name, refusal in explained)
        problem = f"no kernel computes {dtype} on {device.type}: {why}. Take another --head-dim."
    lines = [f"kernels for {dtype} and heads of {head_dim}, the fastest first:"]
    return [*lines, *(f"  {answer}: {', '.join(own)}" for answer, own in names.items() if own)], problem
