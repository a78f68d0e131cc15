"""accelerate's mesh: data-parallel x context-parallel, by a subclass of its own `ParallelismConfig`."""

import os
from dataclasses import dataclass

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from ..mesh import CP_DIM, ContextGroup

SIZE_VARIABLE = "HF_BURST_SIZE"


@dataclass(repr=False)
class BurstParallelismConfig(ParallelismConfig):
    """Lays the mesh for hf_burst: groups of `burst_size` neighbouring ranks share a sequence, groups are data-parallel.

    Passed by the official argument, `Accelerator(parallelism_config=...)` or
    `TrainingArguments(parallelism_config=...)`; accelerate's data loaders then give every rank of a group the same
    batch. What is left of the ranks is data-parallel: sharded under FSDP2, replicated otherwise.

    Args:
        burst_size (`int`, *optional*): Ranks that share a sequence; all ranks by default.

    Example:

    ```python
    >>> accelerator = Accelerator(parallelism_config=hf_burst.BurstParallelismConfig(burst_size=2))
    ```
    """

    burst_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burst_size is not None and (not isinstance(self.burst_size, int) or self.burst_size < 1):
            raise ConfigError(
                f"burst_size is {self.burst_size!r}; it must be an int of at least 1, or None for all ranks."
            )
        for name in ("tp_size", "cp_size", "sp_size"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} beside burst_size={self.burst_size}: a sequence is sharded by "
                    f"burst_size alone, and tensor parallelism is not combined with it. Leave {name} at 1."
                )

    @classmethod
    def from_env(cls) -> "BurstParallelismConfig":
        """Reads `burst_size` from the environment variable `HF_BURST_SIZE`; unset, all ranks share a sequence.

        `accelerate launch` builds accelerate's own class only, so a launched script calls this.
        """
        value = os.environ.get(SIZE_VARIABLE)
        if value is None:
            return cls()
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(
                f"{SIZE_VARIABLE}={value!r} is not a number of ranks; set it to an integer of at least 1."
            )
        return cls(burst_size=int(value))

    @property
    def shares_sequences(self) -> bool:
        """Whether several ranks share a sequence; known once the mesh is laid."""
        return (self.burst_size or 1) > 1

    @property
    def total_size(self) -> int:
        """The number of ranks of the whole mesh."""
        return int(self.dp_replicate_size * self.dp_shard_size * (self.burst_size or 1))

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Mesh dimensions whose ranks receive the same batch."""
        return [CP_DIM] if self.shares_sequences else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which FSDP shards the model."""
        return (["dp_shard"] if self.dp_shard_enabled else []) + self.non_dp_dim_names

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which the loss is averaged."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Divides the ranks into groups, then builds the mesh as accelerate does."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self.burst_size is None:
            self.burst_size = max(1, world // (self.dp_replicate_size * self.dp_shard_size))
        if self.dp_replicate_size == self.dp_shard_size == 1 and world % self.burst_size == 0:
            dimension = "dp_shard" if _fsdp2() else "dp_replicate"
            self._set_size(dimension, world // self.burst_size)
        if self.total_size != world:
            raise ConfigError(
                f"burst_size={self.burst_size} x dp_replicate_size={self.dp_replicate_size} x "
                f"dp_shard_size={self.dp_shard_size} is {self.total_size} ranks, but {world} were launched. Launch a "
                "multiple of burst_size (accelerate launch --num_processes N) or choose a burst_size that divides it."
            )
        self._sizes[CP_DIM] = self.burst_size
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """The sizes were checked with the mesh; accelerate's own check refuses CPU processes, which are served here."""


def _fsdp2() -> bool:
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    return plugin is not None and plugin.fsdp_version == 2


def resolve_group(given: ContextGroup | None) -> ContextGroup:
    """The ranks that share a sequence: those of the argument, else of accelerate's state, else all.

    Args:
        given ([`ContextGroup`], *optional*): That of the mesh that the user passed.

    Raises:
        ConfigError: If the argument and accelerate's state name different groups, or accelerate itself shards
            sequences.
    """
    state = AcceleratorState._shared_state
    config = state.get("parallelism_config")
    if isinstance(config, BurstParallelismConfig):
        device_mesh = state.get("device_mesh") or config.device_mesh
        shared = ContextGroup.from_mesh(device_mesh[CP_DIM]) if config.shares_sequences else ContextGroup()
        if given is not None and given.members != shared.members:
            raise ConfigError(
                f"Two groups are named: the mesh passed to hf_burst has the ranks {given.members}, "
                f"BurstParallelismConfig(burst_size={shared.size}) has {shared.members}. Pass one of them only."
            )
        return given or shared
    if config is not None and (config.cp_size > 1 or config.sp_size > 1):
        raise ConfigError(
            f"accelerate's own ParallelismConfig has cp_size={config.cp_size} and sp_size={config.sp_size}, so the "
            "sequence would be sharded twice. Use hf_burst.BurstParallelismConfig(burst_size=N) instead."
        )
    return given or ContextGroup.from_mesh(None)
