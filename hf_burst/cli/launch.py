"""The processes of a launch, as `torchrun` and `accelerate launch` describe them in the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..mesh import ContextGroup


def launched() -> tuple[int, int]:
    """How many processes there are, and the number of this one; without a launcher one process, number 0. Raises a
    [`ConfigError`] if the variables cannot be those of a launcher."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(
                f"The environment variable {name} is {os.environ[name]!r}; torchrun and accelerate launch set a number "
                "there. Unset it, or start with one of them."
            )
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size > 1 and missing:
        raise ConfigError(
            f"The environment variable WORLD_SIZE is {size} without {', '.join(missing)}: start all processes with "
            "torchrun or accelerate launch, or unset WORLD_SIZE."
        )
    if rank >= size:
        raise ConfigError(
            f"The environment variables say RANK {rank} of WORLD_SIZE {size}; ranks are counted from 0. Unset both, or "
            "start with torchrun or accelerate launch."
        )
    return size, rank


@contextmanager
def joined() -> Iterator[tuple[ContextGroup, torch.device]]:
    """The ranks of a launch, joined for the time of a command, and the device of this one; or this process alone.
    Raises as [`launched`] does."""
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
