"""Optimizers of a model that are there by now, and what their states will take."""

import gc
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_ADAM = 2  # numbers of an optimizer for each weight


def bytes_to_come(model: nn.Module, device: torch.device) -> int:
    """Bytes of a device that states of an optimizer like Adam will take: of all weights that learn there, but for those
    that have states already, as in a run that was resumed."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
    known = {id(weight) for optimizer in _optimizers() for weight in optimizer.state if optimizer.state[weight]}
    pairs = zip(trained, local, strict=True)
    return _ADAM * sum(own.nbytes for weight, own in pairs if own.device == device and id(weight) not in known)


def _optimizers() -> Iterator[Optimizer]:
    """All optimizers of this process. Torch keeps no list of them."""
    return (found for found in gc.get_objects() if issubclass(type(found), Optimizer))
