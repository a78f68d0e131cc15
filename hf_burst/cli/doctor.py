"""`hf-burst doctor`: reports versions, devices, kernels and misconfigured hosts, to paste into an issue."""

import argparse
import os
import platform

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..kernels import KernelRequest, explain_kernels
from . import hosts
from .launch import device_here, launched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, default=128, help="head size for the kernels (default %(default)s)")
    parser.epilog = "Start it under torchrun or accelerate launch to check the hosts of a launch."


def run(arguments: argparse.Namespace) -> int:
    """Prints the report on rank 0; returns 0 if attention can run here, else 1. Ranks exchange reports through the
    launcher's store, without process groups."""
    size, rank = launched()
    device = device_here()
    lines: list[str] = []
    problems: list[str] = []
    if size > 1:
        mine = hosts.report("nccl" if device.type == "cuda" else "gloo")
        reports = hosts.gather(mine, rank, size, next(rendezvous("env://"))[0])
        problems = hosts.obstacles(reports)
        lines += [hosts.describe(reports), *(f"Check: {remark}" for remark in hosts.remarks(reports)), ""]
    lines += _describe_place(size, device)
    kernels, problem = _kernels(arguments.head_dim, device)
    lines += kernels
    if device.type == "cuda" and not dist.is_nccl_available():
        problem = "this torch has GPUs and no NCCL; install a CUDA build of torch, or set ACCELERATE_USE_CPU=1."
    problems += [problem] if problem else []
    if rank == 0:
        print(*lines, "", *([f"Not usable: {problem}" for problem in problems] or ["Usable."]), sep="\n")
    return 1 if problems else 0


def _describe_place(size: int, device: torch.device) -> list[str]:
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines.append(f"  {', '.join(f'{name} {version}' for name, version in hosts.versions().items())}")
    lines.append(f"ranks: {size} in this launch, on {device}")
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
    """Returns lines about the kernels for this head size, why others are unsupported, and a problem if all are."""
    if head_dim < 1:
        return [], f"--head-dim is {head_dim}; it must be at least 1."
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    explained = explain_kernels(KernelRequest(device.type, dtype, head_dim, head_dim))
    names: dict[str, list[str]] = {"can": []}
    for name, refusal in explained:
        names.setdefault(refusal or "can", []).append(name)
    lines = [f"kernels for {dtype} and heads of {head_dim}, the fastest first:"]
    lines += [f"  {answer}: {', '.join(own)}" for answer, own in names.items() if own]
    if names["can"]:
        return lines, ""
    why = "; ".join(f"{name} {refusal}" for name, refusal in explained)
    return lines, f"no kernel computes {dtype} on {device.type}: {why}. Take another --head-dim."
