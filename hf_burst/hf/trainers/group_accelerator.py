"""An accelerator that presents a group of ranks as one process."""

import logging
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor

from ...errors import BurstError, RankMismatchError
from ...ranks.group import CP_DIM, ContextGroup, set_timeout

logger = logging.getLogger(__name__)


class Groups:
    """An accelerator whose processes are groups of ranks. Everything else is delegated to the wrapped accelerator.

    Args:
        accelerator (`Accelerator`): The wrapped accelerator.
        size (`int`): The number of ranks in a group.
    """

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        self.accelerator = accelerator
        self.num_processes = accelerator.num_processes // size
        self.process_index = accelerator.process_index // size
        self.peers = _peers(accelerator) if self.num_processes > 1 else ContextGroup()
        self.parted: BaseException | None = None  # the error that ended a collective on this rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def every(self, mine: Any) -> list[Any]:
        """Gathers one value from each group. Raises if groups are at different collectives, or one has an error."""
        try:
            return self.peers.gather(mine, self.accelerator.device, "a collective over groups of ranks")
        except BaseException as problem:
            self.parted = problem
            raise

    def end_others(self, problem: BaseException) -> None:
        """Raises this group's error in the other groups, which wait in their next collective."""
        if self.parted is not None or self.peers.size == 1 or not isinstance(problem, Exception):
            return
        error = RankMismatchError(f"Group {self.process_index} of the ranks met {type(problem).__name__}: {problem}")
        if not isinstance(problem, BurstError):  # logged now, because other groups may arrive late
            logger.error("hf_burst: %s", error)
        with suppress(BurstError):
            self.peers.agree({}, error, self.accelerator.device, doing="the end of a step")

    def gather(self, tensors: Any) -> Any:
        """Gathers as `Accelerator.gather`, over the ranks with this rank's place in their groups."""

        def over_groups(tensor: Tensor) -> Tensor:
            own = (tensor[None] if tensor.ndim == 0 else tensor).detach().cpu()
            return torch.cat(self.every(own)).to(tensor.device)

        return recursively_apply(over_groups, tensors, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces as `Accelerator.reduce`."""

        def over_groups(tensor: Tensor) -> Tensor:
            total = torch.stack(self.every(tensor.detach().cpu())).sum(0).to(tensor.device)
            return total / self.peers.size * scale if reduction == "mean" else total * scale

        return recursively_apply(over_groups, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Waits as `Accelerator.wait_for_everyone`."""
        self.every(None)

    def gather_object(self, objects: Any) -> Any:
        """Gathers as `accelerate.utils.gather_object`."""
        return [item for own in self.every(objects) for item in own]

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        """Broadcasts as `accelerate.utils.broadcast_object_list`."""
        objects[:] = self.every(objects)[from_process]
        return objects


def _peers(accelerator: Accelerator) -> ContextGroup:
    """Returns the group of the ranks that have this rank's place in their own groups."""
    mesh = accelerator.torch_device_mesh
    names = [name for name in mesh.mesh_dim_names or () if name != CP_DIM]
    peers = ContextGroup.from_mesh(mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("dp"))
    limit = ContextGroup.from_mesh(None).time_limit(accelerator.device)
    set_timeout(limit, peers.process_group)  # they wait for each other's rollouts
    return peers
