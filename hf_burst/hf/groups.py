"""The ranks that share a sequence: the user's group, accelerate's mesh, or all ranks."""

import os

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from ..errors import ConfigError
from ..ranks.group import CP_DIM, ContextGroup

PATCH = "_hf_burst"  # the attribute that marks a patched model
_OF_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_processes() -> None:
    """Raises a ConfigError if the launcher, torch.distributed and accelerate count different processes, as accelerate
    does without a GPU unless it is told to use CPUs."""
    joined = dist.get_world_size() if dist.is_initialized() else 1
    launched = max(_launched(), joined)
    counted = PartialState._shared_state.get("num_processes")
    if counted is not None and counted != launched:
        raise ConfigError(
            f"accelerate knows of {counted} of the {launched} processes that were launched, so nobody would average "
            "their gradients. On CPUs set ACCELERATE_USE_CPU=1 before you launch (for DeepSpeed "
            "TrainingArguments(ddp_backend='gloo')); on GPUs use `accelerate launch --multi_gpu --num_processes N`."
        )


def check_processes_met() -> None:
    """Raises a ConfigError if processes that were launched together are not joined yet, or not any more."""
    if _launched() > 1 and not dist.is_initialized():
        raise ConfigError(
            f"torch.distributed does not join them, the {_launched()} processes that were launched together. Make the "
            "Accelerator before the first batch; after they have parted, call hf_burst.unpatch_model(model)."
        )


def _launched() -> int:
    """Returns how many processes torchrun, or a launcher built on it, has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1


def tells_of_launch(variable: str) -> bool:
    """Returns whether an environment variable shows that a launcher started this process with others."""
    return variable in _OF_LAUNCH or variable.startswith("TORCHELASTIC_")


def resolve_group(named: ContextGroup | None) -> ContextGroup:
    """Returns the ranks that share a sequence: those of the user's group, else of accelerate's state, else all."""
    check_processes()
    named = named and named.renewed()  # torch.distributed reuses the names of destroyed groups
    state = AcceleratorState._shared_state
    config = state.get("parallelism_config")
    if hasattr(config, "shares_sequences"):  # a BurstParallelismConfig
        device_mesh = state.get("device_mesh") or config.device_mesh
        shared = ContextGroup.from_mesh(device_mesh[CP_DIM]) if config.shares_sequences else ContextGroup()
        if named is not None and named.members != shared.members:
            raise ConfigError(
                f"Two groups are named: the one passed to hf_burst has the ranks {named.members}, "
                f"BurstParallelismConfig(burst_size={shared.size}) has {shared.members}. Pass one of them only."
            )
        return named or shared
    if config is not None and (config.cp_size > 1 or config.sp_size > 1):
        raise ConfigError(
            f"accelerate's own ParallelismConfig has cp_size={config.cp_size} and sp_size={config.sp_size}, so the "
            "sequence would be sharded twice. Use hf_burst.BurstParallelismConfig(burst_size=N) instead."
        )
    return named or ContextGroup.from_mesh(None)
