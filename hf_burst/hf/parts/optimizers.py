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
    that have states already, as in a run that was resumed. DeepSpeed's have states of flat weights in their place."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizers = list(_optimizers())
    if any(hasattr(weight, "_hp_mapping") or hasattr(weight, "ds_id") for weight in trained):
        trained = [
            weight for known in optimizers for group in known.get("param_groups", ()) for weight in group["params"]
        ]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
    stated = {id(weight) for known in optimizers for weight, state in known["state"].items() if state}
    pairs = zip(trained, local, strict=True)
    return _ADAM * sum(own.nbytes for weight, own in pairs if own.device == device and id(weight) not in stated)


def _optimizers() -> Iterator[Mapping[str, Any]]:
    """What all optimizers of this process hold, of which torch keeps no list: states by weights, and groups."""
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and isinstance(vars(found).get("state"), Mapping):
            yield vars(found)
