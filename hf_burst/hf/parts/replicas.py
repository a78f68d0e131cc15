"""Checks that the ranks of a group hold equal weights, at the first pass and after the first update."""

import zlib

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...config import BurstConfig
from ...errors import ConfigError, UnsupportedModelError
from ...ranks.group import ContextGroup
from ..batches.sharded import sum_of_bits
from ..forward_pass import Call, ForwardPass
from ..view import ModelView, is_partitioned
from .base import Part

WEIGHTS = "weights (checksum)"
_AT_FIRST = (
    "Every rank must begin with the same weights: load one checkpoint on all of them, or call "
    "accelerate.utils.set_seed(seed) before the model is made. accelerator.prepare(model) sends those of rank 0 to all."
)
_UPDATED = (
    "The ranks began with the same weights, and differ after an update. Their gradients must be averaged and their "
    "optimizers be alike: train what accelerator.prepare(model, optimizer) returns, as Trainer does. DDP averages what "
    "required a gradient when it was made: let what will be unfrozen later require one then, and freeze it afterwards, "
    "with ddp_find_unused_parameters=True. FSDP2 needs neither."
)


class Replicas(Part):
    """Compares the ranks' weights at the first pass, and in passes with gradients until an update has changed them;
    again if other parameters are trained.

    Each rank computes the gradients of its own tokens. A wrapper that averages them over the ranks keeps the weights
    equal, so it must be there in every training pass.
    """

    def __init__(self, config: BurstConfig) -> None:
        self.manual = config.gradients == "manual"
        self.key: tuple[int, ...] = ()  # how many parameters there are, and which are trained
        self.first: int | None = None  # their checksum at the first comparison
        self.settled = False  # whether an update was seen
        self.compared: Tensor | None = None  # the checksum in this pass

    def admit(self, call: Call) -> None:
        self.compared = None
        if call.group.size == 1:
            return
        parameters = list(call.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        learns = torch.is_grad_enabled() and bool(trained)
        if learns and call.model.training and not self.manual:
            check_averaged(call.view, trained, call.group)
        key = (len(parameters), *(id(parameter) for parameter in trained if _is_replicated(parameter)))
        if key != self.key:
            self.key, self.first, self.settled = key, None, False
        if not (self.settled or (self.first is not None and not learns) or has_fsdp1(call.view)):
            self.compared = _checksum(call.model)
            call.agreement.add(WEIGHTS, self.compared, _AT_FIRST if self.first is None else _UPDATED)

    def begin(self, run: ForwardPass) -> None:
        if self.compared is not None:
            checksum = int(self.compared)
            self.first = checksum if self.first is None else self.first
            self.settled = checksum != self.first or len(self.key) == 1  # no trained weight is replicated


def check_averaged(view: ModelView, trained: list[nn.Parameter], group: ContextGroup) -> None:
    """Raises a ConfigError if nothing averages the gradients of trained parameters over the ranks of a group. The
    model is in its forward pass."""
    members, wrapper = set(group.members), DistributedDataParallel._get_active_ddp_module()
    averaged = [] if wrapper is None else [dist.get_process_group_ranks(wrapper.process_group)]
    meshes = {parameter.device_mesh for parameter in trained if isinstance(parameter, DTensor)}
    averaged += [mesh.mesh.flatten().tolist() for mesh in meshes]
    deepspeed = AcceleratorState._shared_state.get("distributed_type") == DistributedType.DEEPSPEED
    # functions that get a parameter's gradient may average it
    hooks = (parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained)
    known = averaged or any(hooks) or deepspeed or has_fsdp1(view) or view.units_of_fsdp2
    few = next((ranks for ranks in averaged if not members <= set(ranks)), [])
    ConfigError.refuse(
        (
            few,
            f"The ranks {sorted(members)} share a sequence, and gradients are averaged over {sorted(few)} only. Wrap "
            "the model for all of them: pass hf_burst.BurstParallelismConfig to the Accelerator, or a mesh to the "
            "wrapper that has these ranks.",
        ),
        (
            not known,
            f"Nothing averages the gradients of the {group.size} ranks that share a sequence, so each would train "
            "weights of its own: the model runs outside of DDP, FSDP and DeepSpeed, and no parameter has a hook. Train "
            "what accelerator.prepare(model, optimizer) returns, as Trainer does. If you average gradients yourself, "
            "say so: patch_model(model, hf_burst.BurstConfig(gradients='manual')).",
        ),
    )


def has_fsdp1(view: ModelView) -> bool:
    """Returns whether FSDP1 averages gradients and shards weights; its shards look like whole weights."""
    state = AcceleratorState._shared_state
    if state.get("distributed_type") == DistributedType.FSDP and state["fsdp_plugin"].fsdp_version == 1:
        return True
    return any(isinstance(module, FullyShardedDataParallel) for module in view.modules)


def refuse_partitioned(module: nn.Module, asked: str) -> None:
    """Raises if DeepSpeed ZeRO-3 divides weights that something needs outside of their own module's call."""
    if is_partitioned(module):
        raise UnsupportedModelError(f"{asked} over DeepSpeed ZeRO-3, which divides weights. Use FSDP2, DDP or ZeRO-2.")


def takes_weights_apart(view: ModelView) -> bool:
    """Returns whether a wrapper (DeepSpeed ZeRO-3, FSDP1) does, so that a backward pass cannot rerun its modules."""
    return is_partitioned(view.root) or has_fsdp1(view)


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Returns whether every rank holds the whole parameter: no if FSDP2 or ZeRO-3 shards it, or it has no values."""
    return not (isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") or parameter.is_meta)


def _checksum(model: nn.Module) -> Tensor:
    """Returns a checksum of the names, shapes, dtypes and values of parameters: a scalar `torch.LongTensor`, which the
    host need not wait for."""
    text, weights = "", list[Tensor]()
    for name, parameter in model.named_parameters():
        text += f"{name}{tuple(getattr(parameter, 'ds_shape', parameter.shape))}{parameter.dtype}"
        if _is_replicated(parameter):
            weights.append(parameter)
    return sum_of_bits(weights) + zlib.crc32(text.encode())
