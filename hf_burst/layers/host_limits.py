"""How much host memory a process may take: within its control groups, with a share for each GPU."""

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
# by cgroup version: the folder of the memory controller, and the names of its limit and usage files
_FILES = {1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("", "memory.max", "memory.current")}


def processes() -> int:
    """Returns the number of this job's processes on the host, as set by the launcher; 1 if it sets none."""
    told = (os.environ.get(name, "") for name in _LAUNCHERS)
    return max(1, next((int(number) for number in told if number.isdigit()), 1))


def share_of_host(device: torch.device) -> int:
    """Returns the bytes of host memory that a process may plan with: an equal part for each GPU of the host, so that
    other jobs keep theirs, and no more than is available for each process of this job."""
    total, available = host_memory()
    return min(total // max(processes(), gpus_of_host(device)), available // processes())


def host_memory() -> tuple[int, int]:
    """Returns the total and available bytes of host memory within this process's control groups."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder, limit, usage in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            most, used = (int((folder / name).read_text()) for name in (limit, usage))
            total, available = min(total, most), min(available, most - used + _reclaimable(folder / "memory.stat"))
    return total, max(0, available)


def gpus_of_host(device: torch.device) -> int:
    """Returns the number of GPUs on the host, including those hidden by CUDA_VISIBLE_DEVICES; 1 for other devices."""
    if device.type != "cuda":
        return 1
    count: Any = getattr(torch.cuda, "_raw_device_count_nvml", lambda: 0)  # torch has no public name for it
    return max(torch.cuda.device_count(), count())


def _control_groups() -> Iterator[tuple[Path, str, str]]:
    """Yields this process's memory control groups, innermost first, because each one's limit applies. A container
    doesn't see the outer groups, and its root is the innermost one."""
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
    """Returns the bytes of file cache that a control group counts as used, but frees on demand."""
    with contextlib.suppress(OSError, ValueError):
        counts = {name: int(count) for name, count in map(str.split, statistics.read_text().splitlines())}
        return counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return 0
