"""An accelerator to whose users a group of ranks is one process."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor

from ...ranks.group import CP_DIM, ContextGroup


class Groups:
    """An accelerator whose processes are groups of ranks. What it does not say is that of the real one.

    Args:
        accelerator (`Accelerator`): The real one.
        size (`int`): The ranks of a group.
    """

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        self.accelerator = accelerator
        self.num_processes = accelerator.num_processes // size
        self.process_index = accelerator.process_index // size
        self.peers = _peers(accelerator) if self.num_processes > 1 else ContextGroup()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def gather(self, tensors: Any) -> Any:
        """As `Accelerator.gather`, over the ranks that have this one's place in their groups."""

        def over_groups(tensor: Tensor) -> Tensor:
            tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
            if self.peers.size == 1:
                return tensor
            every = [torch.empty_like(tensor) for _ in range(self.peers.size)]
            dist.all_gather(every, tensor, group=self.peers.process_group)
            return torch.cat(every)

        return recursively_apply(over_groups, tensors, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`."""

        def over_groups(tensor: Tensor) -> Tensor:
            total = tensor.clone()
            if self.peers.size > 1:
                dist.all_reduce(total, group=self.peers.process_group)
            return total / self.peers.size * scale if reduction == "mean" else total * scale

        return recursively_apply(over_groups, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """As `Accelerator.wait_for_everyone`."""
        if self.peers.size > 1:
            dist.barrier(group=self.peers.process_group)

    def gather_object(self, objects: Any) -> Any:
        """As `accelerate.utils.gather_object`."""
        if self.peers.size == 1:
            return objects
        every: list[Any] = [None] * self.peers.size
        dist.all_gather_object(every, objects, group=self.peers.process_group)
        return [item for own in every for item in own]

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        """As `accelerate.utils.broadcast_object_list`."""
        if self.peers.size > 1:
            dist.broadcast_object_list(objects, src=self.peers.members[from_process], group=self.peers.process_group)
        return objects


def _peers(accelerator: Accelerator) -> ContextGroup:
    """The ranks that have the place of this one in their groups."""
    mesh = accelerator.torch_device_mesh
    names = [name for name in mesh.mesh_dim_names or () if name != CP_DIM]
    peers = ContextGroup.from_mesh(mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("dp"))
    limit = ContextGroup.from_mesh(None).time_limit(accelerator.device)
    dist.distributed_c10d._set_pg_timeout(limit, peers.process_group)  # they wait for rollouts of each other
    return peers
