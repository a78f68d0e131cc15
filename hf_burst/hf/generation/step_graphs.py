"""Runs one-token steps as CUDA graphs, because Python launches a token's kernels more slowly than the GPU runs them.

    steps 1 to 3    run normally; layers allocate room in the first
    step 4          runs with tensors at fixed addresses; then it is recorded, which computes nothing
    step 5          runs, then is replayed with the same received data: if results differ, the recording is dropped
    later steps     are replayed, until layers allocate more room

A recording is split at exchanges, which run normally, so that no rank needs to know whether others record.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch
import torch.nn.modules.module as global_hooks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...attention.shared_keys import Exchange, exchanged
from ...layers.dequantized import Dequantized
from ...ranks.group import ContextGroup
from ..answer import Fixed, Stepping
from ..context import current
from ..models.adapters import adapted_modules, adapters_at_work
from ..overrides import Override
from ..sharded_cache import ShardedCache
from ..view import ModelView

logger = logging.getLogger(__name__)

_AS_THEY_ARE = 2  # normal steps first, because a recording costs as much time as several
_MASK = "attention_mask"  # left out: it grows with each token, and the cache knows the padding
_KNOWN = ("hf_burst.", "transformers.")  # packages whose hooks may be recorded


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the capture stream of a device: always the same, because libraries keep memory per stream."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """The CUDA calls of a recording."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device.index
        self.stream, self.pool, self.under_way = _stream(device), torch.cuda.graph_pool_handle(), False

    def begin(self) -> Any:
        """Starts capturing this thread's work, and returns the graph."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool, capture_error_mode="thread_local")  # other threads use the GPU, too
        self.under_way = True
        return graph

    def end(self, graph: Any) -> None:
        """Ends the capture, unless it has already ended.

        Raises:
            RuntimeError: If a call cannot be captured.
        """
        if not self.under_way:
            return
        self.under_way = False
        try:
            graph.capture_end()
        except BaseException:  # torch would keep allocating from the pool
            torch._C._cuda_endAllocateToPool(self.device, self.pool)
            torch._C._cuda_releasePool(self.device, self.pool)
            raise

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Switches to the capture stream, where nothing else runs."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    @staticmethod
    @contextmanager
    def noticed_waits() -> Iterator[list[str]]:
        """Yields a list that receives the places where a pass waits for the GPU, which a graph cannot."""
        before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for found in said:
            if "called a synchronizing" in str(found.message):
                waits.append(f"{found.filename}:{found.lineno}")
            elif "debug mode is a prototype" not in str(found.message):
                warnings.warn_explicit(found.message, found.category, found.filename, found.lineno)


class Recording:
    """A step as CUDA graphs, with the exchanges between them."""

    def __init__(self, device: torch.device) -> None:
        self.graphs = CudaGraphs(device)
        self.pieces: list[tuple[Any, Tensor, Tensor, ContextGroup]] = []  # a graph, what is sent, what is received
        self.last: Any = None
        self.output: Any = None
        self.compared = False  # whether a replay has been found equal

    def record(self, run: Callable[[Exchange], Any]) -> None:
        """Records the GPU work of a function.

        Raises:
            RuntimeError: If a call in it cannot be captured.
        """
        with self.graphs.aside():
            self.last = self.graphs.begin()
            try:
                self.output = run(self._cut)
            except BaseException:
                with suppress(RuntimeError):  # has the same cause
                    self.graphs.end(self.last)
                raise
            self.graphs.end(self.last)

    def _cut(self, own: Tensor, group: ContextGroup) -> Tensor:
        self.graphs.end(self.last)
        received = own.new_empty(group.size, *own.shape)
        self.pieces.append((self.last, own, received, group))
        self.last = self.graphs.begin()
        return received

    def play(self, exchange: Exchange) -> Any:
        """Replays the step, and returns its output."""
        for graph, own, received, group in self.pieces:
            graph.replay()
            received.copy_(exchange(own, group))
        self.last.replay()
        return tree_map_only(Tensor, Tensor.clone, self.output)


class StepGraphs(Override):
    """A model's forward within one call of `generate`. A call within that call has another cache, and runs normally.
    `changing` says that users' code runs between steps and may change the model."""

    def __init__(self, module: nn.Module, own: Any, cache: ShardedCache, changing: bool) -> None:
        super().__init__(module, own)
        self.cache = cache
        update_wrapper(self, self.own or getattr(type(module), self.name), updated=())
        view = ModelView(module)
        self.watched = view.modules if changing else []
        self.adapted = [inner for _, inner in adapted_modules(view)] if changing else []
        self.before: Any = None  # the state of the first step
        self.seen: Any = None  # the signature of the last step
        self.steps = 0  # number of steps with this signature
        self.inputs: dict[str, Any] = {}
        self.fixed: Fixed | None = None
        self.recording: Recording | None = None
        self.given_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current()
        cache, phase = self.cache, self.cache.answer.phase
        one = isinstance(phase, Stepping) and phase.positions.shape[1] == 1
        if context is None or context.cached is not cache or not one or self.given_up:
            return self.plain(*args, **kwargs)
        state = [*map(adapters_at_work, self.adapted), *map(_state, self.watched)]
        self.before = state if self.seen is None else self.before
        if state != self.before:
            self._give_up("the model was changed while it generated")
            return self.plain(*args, **kwargs)
        looks = _looks(cache, kwargs)
        if looks is None or args:
            self._give_up("a step has arguments that cannot be compared with those of another")
            return self.plain(*args, **kwargs)
        if looks != self.seen:
            self.seen, self.steps, self.fixed, self.recording = looks, 0, None, None
        self.steps += 1
        if self.steps <= _AS_THEY_ARE or not self._move(kwargs):
            return self.plain(**kwargs)
        assert self.fixed is not None, "it has moved"
        if self.recording is None:
            output = self._run_and_record(self.fixed)
        elif not self.recording.compared:
            output = self._run_and_compare(self.fixed, self.recording)
        else:
            output = self.recording.play(exchanged)
        self.fixed.count()
        return output

    def _move(self, kwargs: Mapping[str, Any]) -> bool:
        """Copies inputs that change between steps to fixed addresses; returns whether layers have room for a token."""
        if self.fixed is None:
            self.fixed = self.cache.fixed_step()
            if self.fixed is None:
                self._give_up("layers do not keep the same number of keys")
            own = {name: value for name, value in kwargs.items() if name != _MASK}
            self.inputs = tree_map_only(Tensor, Tensor.clone, own)
        for name, place in self.inputs.items():
            if isinstance(place, Tensor):
                place.copy_(kwargs[name])
        return self.fixed is not None and self.fixed.move()

    def _run(self, fixed: Fixed, exchange: Exchange) -> Any:
        """Runs the step with tensors at fixed addresses."""
        with fixed.entered(exchange):
            return self.plain(**self.inputs)

    def _run_and_record(self, fixed: Fixed) -> Any:
        recording = Recording(fixed.positions.device)
        with recording.graphs.aside(), CudaGraphs.noticed_waits() as waits:  # libraries allocate per stream
            output = self._run(fixed, exchanged)
        if waits or fixed.lent:
            waiting = f"the model waits for the device ({waits[0]})" if waits else ""
            self._give_up(waiting or "the model asks its cache how long it is, and computes with the number")
            return output
        try:
            recording.record(partial(self._run, fixed))
        except Exception as problem:
            self._give_up(repr(problem))
        else:
            self.recording = recording
        return output

    def _run_and_compare(self, fixed: Fixed, recording: Recording) -> Any:
        """Runs a step, then replays it with the same received data; what it sends, returns and saves must be equal."""
        sent: list[Tensor] = []
        received: list[Tensor] = []

        def noted(own: Tensor, group: ContextGroup) -> Tensor:
            sent.append(own.clone())
            received.append(exchanged(own, group))
            return received[-1]

        def repeated(own: Tensor, group: ContextGroup) -> Tensor:
            again.append(own.clone())
            return received[len(again) - 1]

        again: list[Tensor] = []
        states = self.cache.state_tensors  # each run of the step would advance them
        before = [state.clone() for state in states]
        output = self._run(fixed, noted)
        after = [state.clone() for state in states]
        for state, earlier in zip(states, before, strict=True):
            state.copy_(earlier)
        played = recording.play(repeated)
        expected, found = [*sent, *after, *_tensors(output)], [*again, *states, *_tensors(played)]
        if _tensors(output) and all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)):
            recording.compared = True
            return output
        self._give_up("a recorded step computed something else")
        for state, known in zip(states, after, strict=True):
            state.copy_(known)
        return output

    def _give_up(self, why: str) -> None:
        self.given_up, self.recording = True, None
        logger.info("hf_burst generates without CUDA graphs: %s.", why)


def _looks(cache: ShardedCache, kwargs: Mapping[str, Any]) -> Any:
    """Returns the signature that a step must share with its recording; `None` for arguments that cannot be compared."""
    found: list[tuple[Any, ...]] = []
    if cache.is_padded and kwargs.get("position_ids") is None:  # positions may depend on the mask, which is left out
        return None
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            found.append((name, value.dtype, value.device, () if name == _MASK else value.shape))
        elif value is None or isinstance(value, bool | int | float | str):
            found.append((name, value))
        elif value is not cache:
            return None
    return tuple(found), cache.places


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _obstacle(model: nn.Module) -> str:
    """Returns why a model's steps cannot be recorded; empty if no reason is known."""
    if StepGraphs.of(model) is not None:
        return "it is called within another call"
    devices = {weight.device for weight in model.parameters()}
    if {device.type for device in devices} != {CudaGraphs.device_type} or len(devices) > 1:
        return f"the model is on {', '.join(sorted(map(str, devices)))}"
    if torch.is_autocast_enabled(CudaGraphs.device_type):
        return "autocast is on"
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return "all modules have a hook"
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return "weights lie on several ranks"
    for name, module in ModelView(model).named:
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            return f"{name or 'the model'} is compiled"
        if isinstance(module, Dequantized):
            return "experts are in 4 bits"
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        others = [hook for hook in hooks if not _module_of(hook).startswith(_KNOWN)]
        if others or "_hf_hook" in vars(module):  # accelerate's
            return f"{name or 'the model'} has a hook"
    return ""


def _module_of(hook: Any) -> str:
    """Returns the module name of a hook's function."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def _state(module: nn.Module) -> tuple[Any, ...]:
    """Returns what users may change of a module: its mode, forward, hooks, submodules and weight addresses."""
    own = vars(module)
    hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"])
    weights = (*own["_parameters"].values(), *own["_buffers"].values())
    places = [None if weight is None else weight.data_ptr() for weight in weights]
    return own["training"], own.get("forward"), hooks, [*own["_modules"].values()], places


@contextmanager
def stepping(model: nn.Module, cache: ShardedCache, changing: bool) -> Iterator[None]:
    """Replays one-token steps of a model as CUDA graphs where possible, see `StepGraphs`."""
    obstacle = _obstacle(model)
    on_cpu = all(weight.is_cpu for weight in model.parameters())
    stepped = None if obstacle else StepGraphs.put(model, cache, changing)
    if obstacle and not (on_cpu and CudaGraphs.device_type == "cuda"):  # nobody expects them without a GPU
        logger.info("hf_burst generates without CUDA graphs: %s.", obstacle)
    try:
        yield
    finally:
        if stepped is not None:
            stepped.remove()
