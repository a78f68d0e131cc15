"""Where and with what a benchmark ran."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from hf_burst.version import __version__

if TYPE_CHECKING:
    from recipes.benchmarks.ranks import Ranks

SCHEMA_VERSION = 1
_PACKAGES = (
    *("flash-attn", "flash-attn-4", "ring-flash-attn", "axolotl-ringmaster", "deepspeed"),
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm"),
    *("ffpa-attn", "nvidia-cutlass-dsl", "triton", "transformers", "accelerate", "liger-kernel", "peft"),
    *("trl", "bitsandbytes"),
)


def environment(ranks: "Ranks", commit: str | None, command: Sequence[str] = ()) -> dict[str, Any]:
    """The beginning of a result: command (this process's by default), commit, hardware and versions. All ranks call it
    together."""
    hosts = len(set(ranks.gather(socket.gethostname())))
    return {
        "schema": SCHEMA_VERSION,
        "command": " ".join([Path(sys.argv[0]).name, *(command or sys.argv[1:])]),
        "git_commit": commit or git_commit(Path(__file__).parent),
        "hardware": hardware(ranks.device, ranks.size, hosts),
        "versions": versions(ranks.cuda),
    }


def made_by(processes: int) -> dict[str, Any]:
    """What a result of a recipe was made by: command, commit, processes, device and versions."""
    cuda = torch.cuda.is_available()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": git_commit(Path(__file__).parent),
        "processes": processes,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "versions": versions(cuda),
    }


def hardware(device: torch.device, ranks: int, hosts: int) -> dict[str, Any]:
    """The name of the device, its memory, and how many ranks, hosts and CPUs there are."""
    name, memory_gib = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_gib = properties.name, round(properties.total_memory / 2**30, 1)
    return {"device": name, "memory_gib": memory_gib, "ranks": ranks, "hosts": hosts, "cpus": os.cpu_count()}


def versions(cuda: bool) -> dict[str, str]:
    """Versions of hf_burst, Python, torch, its libraries for GPUs, and of installed packages that matter."""
    known = {"hf_burst": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    if cuda:
        known["cuda"] = str(torch.version.cuda)
        known["cudnn"] = str(torch.backends.cudnn.version())
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return known


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that a folder lies in, "+" where files differ; `None` without a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def interquartile_range(values: Sequence[float]) -> float:
    """The distance between the quartiles; 0 for a single value."""
    first, third = numpy.percentile(values, (25, 75))
    return float(third - first)
