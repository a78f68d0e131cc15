"""Has a backward pass end behind what FSDP2 gathers, in versions of torch that do not see to it."""

from collections.abc import Collection
from functools import partial
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
        streams = {unit._get_fsdp_state()._comm_ctx.all_gather_stream for unit in units}  # torch has no public accessor
        learns = [value for value in tree_leaves(outputs) if isinstance(value, Tensor) and value.requires_grad]
        for value in learns if streams else ():
            value.register_hook(partial(_wait_at_the_end, streams, run.device))


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
