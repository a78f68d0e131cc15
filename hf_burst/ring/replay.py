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
from .symmetric import Symmetric, SymmetricPool, remember

logger = logging.getLogger(__name__)

_LARGEST = 1 << 25
_MOST = 8
_SIGHTINGS = 48  # a step or two of a model: lengths that change with every batch are not worth it

Pass = Callable[[Exchange, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Recorded:
    """A pass that was recorded.

    Recorded passes share one symmetric memory: a replay begins when all ranks have ended the one before.

    Args:
        pool ([`SymmetricPool`]): The symmetric memory of recorded passes.
        run (`Callable`): The pass: takes an [`Exchange`] and tensors, returns tensors.
        inputs (sequence of `torch.Tensor`): What it is given, for shapes and dtypes.
    """

    def __init__(self, pool: SymmetricPool, run: Pass, inputs: Sequence[torch.Tensor]) -> None:
        self.pool, self.graph, self.problem = pool, torch.cuda.CUDAGraph(), ""
        given = [tensor.clone() for tensor in inputs]  # each in memory of its own, by which it is known again
        first = self._rehearse(run, given)
        # what is published at once is copied to where it is published from
        places = {tensor.data_ptr(): place for tensor, place in first.first if tensor.numel() == place.numel()}
        self.inputs = [
            places[one.data_ptr()].view(one.shape) if one.data_ptr() in places else torch.empty_like(one)
            for one in given
        ]
        self._rehearse(run, self.inputs)  # makes what must not be made while recording
        pool.meet()
        pool.restart()
        self.exchange = Symmetric(pool)  # which holds what is recorded
        self.outputs: list[torch.Tensor] = []
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
                self.outputs = list(run(self.exchange, self.inputs))
                torch.cuda.current_stream(pool.device).wait_stream(pool.stream)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            self.problem = repr(error).splitlines()[0]
        self.memory = list(pool.channels.values())  # what is recorded reads and writes it

    def _rehearse(self, run: Pass, inputs: Sequence[torch.Tensor]) -> Symmetric:
        self.pool.meet()
        self.pool.restart()
        exchange = Symmetric(self.pool)
        run(exchange, inputs)
        torch.cuda.current_stream(self.pool.device).wait_stream(self.pool.stream)
        return exchange

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a pass, in memory of their own."""
        self.pool.meet()  # nobody reads any more what the replay before has published
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return [torch.empty_like(output).copy_(output, non_blocking=True) for output in self.outputs]


def recorded(pool: SymmetricPool, key: Hashable, run: Pass, inputs: Sequence[torch.Tensor]) -> Recorded | None:
    """The recording of a pass; `None` until it has come often enough, if a rank could not record it, and if there are
    many already, whose memory would add up. All ranks of the pool call it equally often, in the same order."""
    if key in pool.passes:
        found: Recorded | None = pool.passes[key]
        return found
    sightings = pool.sightings.get(key, 0) + 1
    remember(pool.sightings, key, sightings)
    if sightings < _SIGHTINGS or len(pool.passes) >= _MOST:
        return None
    with torch.inference_mode(False), torch.no_grad():  # later passes may train
        made = Recorded(pool.recordings, run, inputs)
    problems = [made.problem] * pool.group.size
    dist.all_gather_object(problems, made.problem, group=pool.group.process_group)
    if any(problems):
        logger.warning("hf_burst launches a pass kernel by kernel, since it could not be recorded: %s", problems)
        pool.passes[key] = None
        return None
    pool.passes[key] = made
    logger.info("hf_burst replays a pass that recurs from now on (inputs %s)", [tuple(one.shape) for one in inputs])
    return made


def recurs(masks: Sequence[Mask], q: torch.Tensor) -> bool:
    """Whether a pass is worth recording: short, and of whole sequences, whose masks are the same in every step."""
    return q.nbytes <= _LARGEST and all(len(mask.documents) == 2 for mask in masks)
