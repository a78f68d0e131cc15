"""Has a backward pass end behind what FSDP2 gathers, in versions of torch that do not see to it."""

from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ..forward_pass import ForwardPass
from .base import Outputs, Part


class Gathers(Part):
    """Has the stream of a training step wait, at the end of its backward pass, for all that FSDP2 has gathered.

    FSDP2 gathers each unit ahead of its turn, and in vain if no gradient goes there, as for frozen embeddings below the
    first adapter. Before torch 2.15 it gave the memory of such a gather back while it could still be under way:
    `finalize_backward` has a `torch.Stream` wait for an event of CUDA, which does nothing. A gather that waited for a
    late rank then wrote over the weights that were gathered there next.
    """

    def after(self, run: ForwardPass, outputs: Outputs) -> None:
        units: Any = run.call.view.units_of_fsdp2 if frees_early(run.device) else ()
        if not units:
            return
        stream = units[0]._get_fsdp_state()._comm_ctx.all_gather_stream  # torch has no public accessor

        def begins(gradient: Tensor) -> None:
            engine: Any = Variable._execution_engine
            engine.queue_callback(lambda: torch.get_device_module(run.device).current_stream().wait_stream(stream))

        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(begins)


def frees_early(device: torch.device) -> bool:
    """Returns whether FSDP2 frees what it gathers without waiting for it."""
    return device.type == "cuda" and Version(torch.__version__) < Version("2.15")
