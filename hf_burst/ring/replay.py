"""A pass that recurs with the same shapes, recorded once and launched at once (CUDA graphs).

At small lengths the host needs longer to launch a pass than the GPU to run it. What recurs is recorded with buffers of
its own; later passes copy their inputs in and the results out.
"""

import logging
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

from ..plan import Mask
from .exchange import Exchange
from .symmetric import Arena, Segments, Symmetric

logger = logging.getLogger(__name__)

_LARGEST = 1 << 25
_MOST = 8
_SIGHTINGS = 48  # a step or two of a model: lengths that change with every batch are not worth it

Pass = Callable[[Exchange, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Recorded:
    """One recurring pass: run as it is at first, then recorded, and replayed from then on.

    Recorded passes share one symmetric memory: a replay begins when all ranks have ended the one before.

    Args:
        arena ([`Arena`]): The symmetric memory for passes that are not recorded.
        run (`Callable`): The pass: takes an [`Exchange`] and tensors, returns tensors.
    """

    def __init__(self, arena: Arena, run: Pass) -> None:
        self.arena, self.run, self.own = arena, run, arena.recordings
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.exchange: Symmetric | None = None  # which holds what is recorded
        self.memory: list[Segments] = []  # and what it reads and writes
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a pass, in memory of their own."""
        self.seen += 1
        if self.seen == _SIGHTINGS:
            with torch.inference_mode(False), torch.no_grad():  # later passes may train
                self.graph = self._record(inputs)
        if self.graph is None:
            return list(self.run(Symmetric(self.arena), inputs))
        self.own.meet()  # nobody reads any more what the replay before has published
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return [torch.empty_like(output).copy_(output, non_blocking=True) for output in self.outputs]

    def _record(self, inputs: Sequence[torch.Tensor]) -> torch.cuda.CUDAGraph | None:
        """The pass as a graph; `None` if a rank could not record it, and then on all of them."""
        own, first, graph = self.own, Symmetric(self.own), torch.cuda.CUDAGraph()
        own.meet()
        own.restart()
        self.run(first, inputs)
        torch.cuda.current_stream(own.device).wait_stream(own.stream)
        # what is published at once is copied to where it is published from
        places = list(first.first)
        for tensor in inputs:
            own_place = (tensor.data_ptr(), tensor.numel())
            index = next((i for i, (one, _) in enumerate(places) if (one.data_ptr(), one.numel()) == own_place), None)
            self.inputs.append(torch.empty_like(tensor) if index is None else places.pop(index)[1].view(tensor.shape))
        own.meet()
        own.restart()
        self.run(Symmetric(own), self.inputs)  # makes what must not be made while recording
        torch.cuda.current_stream(own.device).wait_stream(own.stream)
        own.meet()
        own.restart()
        self.exchange = Symmetric(own)
        problem = ""
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                own.stream.wait_stream(torch.cuda.current_stream(own.device))
                self.outputs = list(self.run(self.exchange, self.inputs))
                torch.cuda.current_stream(own.device).wait_stream(own.stream)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        self.memory = list(own.channels.values())
        found = [problem] * own.group.size
        dist.all_gather_object(found, problem, group=own.group.process_group)
        if any(found):
            logger.warning("hf_burst launches a pass kernel by kernel, since it could not be recorded: %s", found)
            return None
        return graph


def recorded(arena: Arena, key: Hashable, run: Pass) -> Recorded | None:
    """The pass of a key, one for all its calls; `None` if there are many already, whose memory would add up."""
    if key not in arena.passes and len(arena.passes) < _MOST:
        arena.passes[key] = Recorded(arena, run)
    return arena.passes.get(key)


def recurs(masks: Sequence[Mask], q: torch.Tensor) -> bool:
    """Whether a pass is worth recording: short, and of whole sequences, whose masks are the same in every step."""
    short = q.nbytes <= _LARGEST and all(len(mask.documents) == 2 for mask in masks)
    return short and not torch.cuda.is_current_stream_capturing()
