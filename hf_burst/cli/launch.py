"""The processes of a launch, read from the environment of `torchrun` or `accelerate launch`."""

import os

import torch

from ..errors import ConfigError


def launched() -> tuple[int, int]:
    """Returns the number of processes and the rank of this one; (1, 0) without a launcher. Raises a [`ConfigError`] if
    the variables are inconsistent."""
    variables = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in os.environ}
    complete = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if all(number.isdecimal() for number in variables.values()):
        size, rank = int(variables.get("WORLD_SIZE", "1")), int(variables.get("RANK", "0"))
        if rank < size and (size == 1 or complete):
            return size, rank
    raise ConfigError(
        f"The environment variables {' '.join(f'{name}={value}' for name, value in variables.items())} cannot be those "
        "of a launcher: they are numbers, ranks are counted from 0, several need RANK, MASTER_ADDR and MASTER_PORT. "
        "Unset them, or start with torchrun or accelerate launch."
    )


def device_here() -> torch.device:
    """Returns the device of this process: its GPU, or the CPU if there is none or accelerate is told to use CPUs."""
    here = int(os.environ.get("LOCAL_RANK", "0"))
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    on_gpu = torch.cuda.is_available() and here < torch.cuda.device_count() and not forced
    return torch.device("cuda", here) if on_gpu else torch.device("cpu")
