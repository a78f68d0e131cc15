"""Runs of checkpointed layers. Some do not keep their input, and recompute it from the input of an earlier layer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .offload import Saved, SavedByLayer, saved_in_place
from .surroundings import draws_as_now, function_modes_as_now

Place = tuple[Any, ...]


def place_of(tensor: Tensor) -> Place:
    """Identifies a tensor by its memory, because hooks and wrappers pass on other objects with the same data."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


class LayerRun:
    """One run of a checkpointed layer, which gives the backward pass its input.

    The run either keeps its input or follows another run, whose output is its input. In that case it repeats the runs
    since the last kept input, without a graph, and each of them holds its recomputed input until it is read.

    Args:
        saved ([`SavedByLayer`]): Where the layer saves its tensors.
        inputs (sequence): The layer's arguments. The first tensor with a gradient is its hidden state.
    """

    def __init__(self, saved: SavedByLayer, inputs: Sequence[Any]) -> None:
        self.saved = saved
        tensors = (at for at, value in enumerate(inputs) if type(value) is Tensor and value.requires_grad)
        self.position = next(tensors, None)
        self.place = None if self.position is None else place_of(inputs[self.position])
        self.before: LayerRun | None = None  # the run whose output is this run's input, if this one does not keep it
        self.again: Callable[[Tensor], Tensor] | None = None  # computes the output from the input, without a graph
        self.input: Saved | None = None
        self.ready: Saved | None = None  # the recomputed input

    @property
    def start(self) -> "LayerRun":
        """The run whose kept input this run's input is recomputed from; itself if it keeps its own."""
        run = self
        while run.before is not None:
            run = run.before
        return run

    def follow(self, other: "LayerRun", output: Place) -> None:
        """Drops this run's own input if it is exactly the other run's output."""
        if other.again is not None and self.place == output:
            self.before = other

    def may_run_again(
        self,
        run: Callable[..., Any],
        inputs: Sequence[Any],
        named: Mapping[str, Any],
        preserves_rng: bool,
    ) -> None:
        """Records how to repeat the layer without a graph, as `torch.utils.checkpoint` repeats it with one.

        Args:
            run (callable): The layer.
            inputs, named: Its positional and keyword arguments.
            preserves_rng (`bool`): Whether the repetition draws the same random numbers as this run.
        """
        if self.position is None:
            return
        at = self.position
        before, behind = inputs[:at], inputs[at + 1 :]
        draws = draws_as_now(inputs[at]) if preserves_rng else nullcontext
        modes = function_modes_as_now()
        # runs with a graph must not find casts that were cached without one
        cast, of_host = (
            torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)
            for kind in (inputs[at].device.type, "cpu")
        )

        def again(tensor: Tensor) -> Tensor:
            with draws(), torch.no_grad(), cast, of_host, modes():
                return first_tensor(run(*before, tensor, *behind, **named))

        self.again = again

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks that save the layer's inputs. Those without a gradient stay, as other layers may share them."""
        return saved_tensors_hooks(self._keep, lambda kept: kept())

    def recall(self) -> Tensor:
        """Returns the hidden state that the layer was called with."""
        if self.input is not None:
            return self.input()
        if self.ready is None:
            self._run_earlier()
        assert self.ready is not None, "computed by the runs before it"
        ready, self.ready = self.ready, None
        return ready()

    def _run_earlier(self) -> None:
        """Repeats the runs since the last available input; each computes the input of the next one."""
        runs: list[LayerRun] = [self]
        while runs[0].before is not None and (len(runs) == 1 or runs[0].ready is None):
            runs.insert(0, runs[0].before)
        for run, following in pairwise(runs):
            assert run.again is not None, "followed by another run"
            with run.saved.once_more():
                given = run.ready or run.input
                assert given is not None, "the first of them has its input, and computes that of the others"
                following.saved.prefetch()
                following.ready = saved_in_place(run.again(given()))

    def _keep(self, tensor: Tensor) -> Saved:
        if self.place is None or place_of(tensor) != self.place:
            return self.saved.save(tensor) if tensor.requires_grad else saved_in_place(tensor)
        if self.before is None:
            self.input = self.saved.save(tensor)
        return self.recall


def first_tensor(output: Any) -> Any:
    """Returns the hidden state of a layer's output, which is alone or the first of several results."""
    return output[0] if isinstance(output, tuple) else output
