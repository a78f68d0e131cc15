"""Keeps FSDP2 from gathering, for a backward pass, weights that it never reaches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..forward_pass import ForwardPass
from ..view import ModelView
from .base import Args, Part


class Gathers(Part):
    """Names to FSDP2 the units that a backward pass does not reach, such as frozen embeddings below the first adapter.

    FSDP2 gathers each unit ahead of its turn. Before torch 2.15 it gave back the memory of a gather that nobody waited
    for while it was under way: `finalize_backward` has a `torch.Stream` wait for an event of CUDA, which does nothing.
    Late ranks then wrote over the weights that were gathered there next.
    """

    def __init__(self) -> None:
        self.hooks = dict[Any, RemovableHandle]()  # by unit, which FSDP2 makes of a module in place
        self.reached = set[Any]()  # states of units that a backward pass has to reach

    def begin(self, run: ForwardPass) -> None:
        units: Any = run.call.view.units_of_fsdp2
        frozen = (unit for unit in units if not any(weight.requires_grad for weight in unit.parameters()))
        self.hooks |= {unit: unit.register_forward_hook(self._note) for unit in frozen if unit not in self.hooks}

    def remove(self, view: ModelView) -> None:
        for unit, hook in self.hooks.items():
            hook.remove()
            unit.set_unshard_in_backward(True)

    @torch.compiler.disable
    def _note(self, unit: Any, args: Args, output: Any) -> None:
        state = unit._get_fsdp_state()  # torch has no public accessor
        if state in self.reached:  # maybe by a pass before this one, whose backward pass has not come yet
            return
        weights = (weight for module in state._modules for weight in module.parameters())
        values = (value for value in tree_leaves(output) if isinstance(value, Tensor))
        needed = any(value.requires_grad for value in (*weights, *values))
        if needed:
            self.reached.add(state)
        unit.set_unshard_in_backward(needed)
