"""How much memory of its host a process may take: within its control groups, with a share for each GPU."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

# torchrun and accelerate; Open MPI; MPICH and Intel MPI; SLURM
_LAUNCHERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_PROCESS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# by version of control groups: where those of memory lie, and the names of the files with their limit and usage
_FILES = {1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("", "memory.max", "memory.current")}


def processes() -> int:
    """How many processes of this job share the host, as launchers tell; 1 if none does."""
    told = (os.environ.get(name, "") for name in _LAUNCHERS)
    return max(1, next((int(number) for number in told if number.isdigit()), 1))


def share_of_host(device: torch.device) -> int:
    """Bytes of host memory that a process may plan with: an equal part for each GPU of the host, so that other jobs
    keep theirs, and no more than is available for each process of this job."""
    total, available = host_memory()
    return min(total // max(processes(), gpus_of_host(device)), available // processes())


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that there are, and that are available, within the control groups of this process."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder, limit, usage in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            total, available = min(total, most), min(available, most - used + _reclaimable(folder / "memory.stat"))
    return total, max(0, available)


def gpus_of_host(device: torch.device) -> int:
    """The GPUs of the host, also those that CUDA_VISIBLE_DEVICES hides; for other devices 1."""
    if device.type != "cuda":
        return 1
    count: Any = getattr(torch.cuda, "_raw_device_count_nvml", lambda: 0)  # torch has no public name for it
    return max(torch.cuda.device_count(), count())


def _control_groups() -> Iterator[tuple[Path, str, str]]:
    """The control groups of memory that this process is in, the innermost first: each one's limit counts. Inside of a
    container the outer ones are not to be seen, and the root stands for the innermost."""
    try:
        lines = [line.split(":", 2) for line in _PROCESS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {1 if kinds else 2: path for number, kinds, path in lines if not kinds or "memory" in kinds.split(",")}
    for version, (mount, limit, usage) in _FILES.items():
        inner = PurePosixPath(paths.get(version, "/").lstrip("/"))
        for path in (inner, *inner.parents) if inner.parts else (inner,):
            yield _MOUNT / mount / path, limit, usage


def _reclaimable(statistics: Path) -> int:
    """Bytes that a control group counts as used for files, and gives back when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        counts = {name: int(count) for name, count in map(str.split, statistics.read_text().splitlines())}
        return counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return 0
