"""Optimizers of a model that are there by now, and what their states will take."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

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
    known = {id(weight) for states in _states() for weight, state in states.items() if state}
    pairs = zip(trained, local, strict=True)
    return _ADAM * sum(own.nbytes for weight, own in pairs if own.device == device and id(weight) not in known)


def _states() -> Iterator[Mapping[Any, Any]]:
    """The states of all optimizers of this process, by their weights. Torch keeps no list of optimizers."""
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and isinstance(states := vars(found).get("state"), Mapping):
            yield states
