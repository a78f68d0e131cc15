"""Models whose experts lie on several ranks, as Transformers loads them."""

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig


def over_ranks(model: PreTrainedModel, held: int, **settings: Any) -> PreTrainedModel:
    """A copy of a model, the same on all ranks, of whose experts `held` ranks together have all."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    folder = found[0]
    model.save_pretrained(folder)  # by the first rank
    dist.barrier()
    placed = type(model).from_pretrained(
        folder,
        dtype=model.dtype,
        experts_implementation=model.config._experts_implementation,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=held, **settings),
    )
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return placed.train(model.training)


def divided_twice(weight: nn.Parameter) -> int:
    """What FSDP2 divided a gradient by once too often: in fp64 that of experts that one rank alone has."""
    mesh = getattr(weight, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    alone = "ep" in names and mesh["efsdp"].size() == 1
    return dist.get_world_size() if alone and weight.dtype == torch.float64 else 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of which each rank has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
