"""What FSDP2 needs: names of layers, outputs in their own dtype, and backward passes that end behind its gathers."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from ..forward_pass import ForwardPass
from ..view import ModelView, inner_modules
from .base import Outputs, Part


class Fsdp2(Part):
    """Leaves outputs in the dtype in which the model returns them, and has the stream of a training step wait, at the
    end of its backward pass, for all that FSDP2 has gathered.

    accelerate has FSDP2 cast what the outermost unit returns to the dtype in which a model computes. In bf16 a loss of
    2.34 becomes 2.34375, for `Trainer`'s log and for evaluations. As under DDP, all outputs stay as they are, even if
    16 bits were asked for. FSDP2 also casts them by the policy of a group of which not all modules ran, such as a head
    whose weight alone is read.

    FSDP2 gathers each unit ahead of its turn, and in vain if no gradient goes there, as for frozen embeddings below the
    first adapter. Before torch 2.15 it gave the memory of such a gather back while it could still be under way:
    `finalize_backward` has a `torch.Stream` wait for an event of CUDA, which does nothing. A gather that waited for a
    late rank then wrote over the weights that were gathered there next.

    accelerate wraps the classes that Transformers names, and fails if the model lacks one of them, as Gemma 3 lacks
    SigLIP's text tower. It gets the names of those that are there, without embeddings, as BERT names its own, because
    it wraps the tokens' by themselves.

    TRL reads the weight of a head, which FSDP2 gathers only for a call. If it is a unit of its own, as beside towers or
    in `modules_to_save`, TRL gathers a copy, whose gradients nobody averages. So a head that learns is gathered here,
    for the pass, and again for the backward pass.
    """

    def __init__(self) -> None:
        self.policies = dict[Any, Any]()  # of the states of units whose outputs are not cast
        self.named: Any = None  # by Transformers
        self.read: list[FSDPModule] = []  # units of a head that this pass does not call

    def install(self, view: ModelView) -> None:
        embeddings, named = view.root.get_input_embeddings(), set(view.root._no_split_modules or ())
        units = (module for module in view.modules if type(module).__name__ in named)
        names = {type(unit).__name__ for unit in units if embeddings not in inner_modules(unit)}
        if names:
            self.named, view.root._no_split_modules = view.root._no_split_modules, names

    def begin(self, run: ForwardPass) -> None:
        for state in states_of(run.call.view)[:1]:
            self._leave_dtype(state._state_ctx.iter_forward_root)  # none if units are called one by one
        if run.batch.inputs.get("fused_lm_head"):
            self.read = _learning_units(run.call.view, run.model.get_output_embeddings())
        for unit in self.read:
            unit._get_fsdp_state()._lazy_init()  # for one without an outermost unit
            unit.unshard()

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        states = states_of(run.call.view)
        for state in states:
            if state._modules_to_run_forward:
                self._leave_dtype(state)
        for unit in self.read:
            unit._get_fsdp_state()._register_pre_backward_hook(outputs)
            unit.reshard()
        if not frees_early(run.device):
            return
        contexts = [state._comm_ctx for state in states]  # a unit that never ran has no streams yet
        streams = {context.all_gather_stream for context in contexts if hasattr(context, "all_gather_stream")}
        for value in tree_leaves(outputs) if streams else ():
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_wait_at_the_end, streams, run.device))

    def end(self) -> None:
        self.read = []

    def remove(self, view: ModelView) -> None:
        if self.named:
            view.root._no_split_modules = self.named
        for state, policy in self.policies.items():
            state._mp_policy = policy

    def _leave_dtype(self, state: Any) -> None:
        dtype = state and state._mp_policy.output_dtype
        if dtype is not None and dtype.itemsize < torch.float32.itemsize:
            self.policies[state] = state._mp_policy
            state._mp_policy = replace(state._mp_policy, output_dtype=None)


def _wait_at_the_end(streams: Collection[Any], device: torch.device, gradient: Tensor) -> None:
    """A hook of an output: its gradient begins the backward pass."""

    def wait() -> None:
        for stream in streams:
            torch.get_device_module(device).current_stream(device).wait_stream(stream)

    engine: Any = Variable._execution_engine
    engine.queue_callback(wait)


def frees_early(device: torch.device) -> bool:
    """Returns whether FSDP2 frees what it gathers without waiting for it."""
    return device.type == "cuda" and Version(torch.__version__) < Version("2.15")


def _learning_units(view: ModelView, head: Any) -> list[FSDPModule]:
    """Returns the units that learn and have nothing but a head; others are gathered by what is called."""
    units, inside = list[Any](view.units_of_fsdp2), set(view.inside(head))
    learning = [unit for unit in units if any(weight.requires_grad for weight in unit.parameters())]
    return [unit for unit in learning if inside.issuperset(unit._get_fsdp_state()._modules)]


def states_of(view: ModelView) -> list[Any]:
    """Returns the states of a model's units; torch has no public accessor."""
    units: list[Any] = list(view.units_of_fsdp2)
    return [unit._get_fsdp_state() for unit in units]
