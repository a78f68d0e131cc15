"""A pass that recurs with the same shapes, recorded once and launched at once (CUDA graphs).

At small lengths the host needs longer to launch a pass than the GPU to run it. What recurs is recorded with buffers of
its own; later passes copy their inputs in and the results out.
"""

from collections.abc import Callable, Sequence

import torch

from ..plan import Mask
from .symmetric import Arena, Symmetric

_LARGEST = 1 << 26

Pass = Callable[[Symmetric, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Recorded:
    """One recurring pass: run as it is the first time, recorded the second time, and replayed from then on.

    Args:
        arena ([`Arena`]): The symmetric memory for passes that are not recorded.
        run (`Callable`): The pass: takes an [`Exchange`] and tensors, returns tensors.
    """

    def __init__(self, arena: Arena, run: Pass) -> None:
        self.arena, self.run = arena, run
        self.own: Arena | None = None  # what is recorded reads and writes it
        self.seen = 0
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a pass, in memory of their own."""
        self.seen += 1
        if self.seen == 1:
            return list(self.run(Symmetric(self.arena), inputs))
        if self.own is None:
            self.own = self._record(inputs)
        self.own.meet()  # nobody reads any more what the replay before has published
        torch._foreach_copy_(self.inputs, list(inputs), non_blocking=True)
        self.graph.replay()
        results = [torch.empty_like(output) for output in self.outputs]
        torch._foreach_copy_(results, self.outputs, non_blocking=True)
        return results

    def _record(self, inputs: Sequence[torch.Tensor]) -> Arena:
        own = self.arena.twin()
        first = Symmetric(own)
        self.run(first, inputs)  # takes the memory that recording must not take
        torch.cuda.current_stream().wait_stream(own.stream)
        own.restart()
        # what is published at once is copied to where it is published from
        places = {tensor.data_ptr(): place for tensor, place in first.places}
        self.inputs = [
            places[tensor.data_ptr()].view(tensor.shape) if tensor.data_ptr() in places else torch.empty_like(tensor)
            for tensor in inputs
        ]
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = list(self.run(Symmetric(own), self.inputs))
            torch.cuda.current_stream().wait_stream(own.stream)
        return own


def recurs(masks: Sequence[Mask], q: torch.Tensor) -> bool:
    """Whether a pass is worth recording: short, and of whole sequences, whose masks are the same in every step."""
    return q.nbytes <= _LARGEST and all(len(mask.documents) == 2 for mask in masks)
