"""The processes of a launch, as `torchrun` and `accelerate launch` tell each of them in its environment."""

import os

from ..errors import ConfigError


def launched() -> tuple[int, int]:
    """How many processes there are, and which one this is; one where nothing is said.

    Raises:
        ConfigError: If the variables cannot be those of a launcher.
    """
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
