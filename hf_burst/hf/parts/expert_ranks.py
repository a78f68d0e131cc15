"""Experts that are spread over ranks, to which tokens travel (`AllToAllEP` of Transformers).

The ranks of a sequence hold different tokens, as ranks with different batches do, so the exchange is exact as it is.
This part refuses what Transformers does not check, before a rank waits for others.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ConfigError, UnsupportedModelError
from ...ranks.group import ContextGroup
from ..forward_pass import Call
from .base import Part

_EXPERTS_DIM, _COPIES_DIM = "ep", "efsdp"  # dimensions of Transformers' mesh of experts


class ExpertRanks(Part):
    """Checks a pass of a model whose experts are spread over ranks."""

    def admit(self, call: Call) -> None:
        experts = dict(weights_of_experts(call.model))
        if not experts:
            return
        if call.compiled or any(".base_layer." in name for name in experts):
            raise UnsupportedModelError(
                "Experts that lie on several ranks are served neither under torch.compile nor with an adapter of peft "
                "on them. Leave it out, train adapters of other layers, or load the model without ep_size."
            )
        learns = call.config.gradients != "manual" and call.learns
        found = (f"{name} is in {weight.dtype}" for name, weight in experts.items() if _is_divided_twice(weight))
        twice = next(found, "") if learns else ""
        ConfigError.refuse(
            (
                torch.is_inference_mode_enabled(),
                "The experts of the model lie on several ranks, and FSDP2 cannot gather their weights within "
                "torch.inference_mode(). Use torch.no_grad() instead.",
            ),
            (
                twice,
                f"{twice}, and one rank alone has its experts: FSDP2 then divides their gradients by the number of "
                "ranks twice (torch 2.11 to 2.13). Load the model in torch.float32 or torch.bfloat16, or with an "
                "ep_size of which fsdp_size is a multiple.",
            ),
        )


def weights_of_experts(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Yields the names and weights that are sharded by expert."""
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor) and _EXPERTS_DIM in (weight.device_mesh.mesh_dim_names or ()):
            yield name, weight


def check_same_passes(model: nn.Module, group: ContextGroup) -> None:
    """Raises if experts are spread over several groups of ranks, which generate different numbers of tokens."""
    members = set(group.members) or {dist.get_rank() if dist.is_initialized() else 0}
    for _, weight in weights_of_experts(model):
        ranks = dist.get_process_group_ranks(weight.device_mesh.get_group(_EXPERTS_DIM))
        if not set(ranks) <= members:
            raise ConfigError(
                f"The ranks {sorted(members)} share a prompt, and experts lie on the ranks {ranks}, which would have "
                "to compute as many tokens. To generate, load the model with an ep_size that divides burst_size."
            )


def _is_divided_twice(weight: DTensor) -> bool:
    """Returns whether torch divides the gradients of experts by the number of ranks twice."""
    mesh = weight.device_mesh
    alone = _COPIES_DIM in (mesh.mesh_dim_names or ()) and mesh[_COPIES_DIM].size() == 1
    return alone and weight.requires_grad and weight.dtype not in (torch.float32, torch.bfloat16)
