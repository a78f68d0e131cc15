"""The processes of a launch, read from the environment of `torchrun` or `accelerate launch`."""

import os
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch


def launched() -> tuple[int, int]:
    """Returns the number of processes and the rank of this one; (1, 0) without a launcher. Raises a [`ConfigError`] if
    the variables are inconsistent."""
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    told = {name: os.environ[name] for name in names if name in os.environ}
    size = told.get("WORLD_SIZE", "1")
    rank = told.get("RANK", "0")
    if size.isdecimal() and rank.isdecimal() and int(rank) < int(size) and (size == "1" or len(told) == len(names)):
        return int(size), int(rank)
    raise ConfigError(
        f"The environment variables {' '.join(f'{name}={value}' for name, value in told.items())} cannot be those of a "
        "launcher. Unset them, or start with torchrun or accelerate launch."
    )


def device_here() -> "torch.device":
    """Returns the device of this process: its GPU, or the CPU if there is none or accelerate is told to use CPUs."""
    import torch

    here = int(os.environ.get("LOCAL_RANK", "0"))
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    on_gpu = torch.cuda.is_available() and here < torch.cuda.device_count() and not forced
    return torch.device("cuda", here) if on_gpu else torch.device("cpu")
