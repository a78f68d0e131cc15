"""What a layer knows of its run: one value for attention, recurrent layers and tiles.

    patch.before   enters the context of the pass: layers that do not checkpoint run in it
        checkpoint     enters its own context for each run of its layers, in this thread or one of autograd's:
                       the first run, the run for the output alone, and the run for the graph
    patch.end      leaves it

A layer only reads [`current`] and knows nothing of checkpoints; this holds for new kinds of layers, too.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..attention import AttentionCache
from ..config import BurstConfig
from ..errors import ConfigError
from ..plan import Segments
from ..plan.recurrence import Way
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from ..recurrent import ReplayBuffer
from .sharded_cache import ShardedCache

PASS_KEY = "burst_pass"  # the keyword argument that carries a ShardedPass into compiled graphs


@dataclass(frozen=True)
class LaidTokens:
    """A layout as tensors on the device of a rank, `(batch, n)` for this rank's tokens."""

    encoded: Tensor  # as the attention operator takes it
    places: Tensor | None = None  # in rows or documents, if a layer needs them
    fully_masked: Tensor | None = None  # which tokens see nothing
    real: Tensor | None = None  # which are not padding, if there is any

    @classmethod
    def of(cls, layout: SequenceLayout, rank: int, device: torch.device, places: bool) -> "LaidTokens":
        """Returns the tensors of one rank, with places or without."""
        encoded = layout.encode()
        torch._dynamo.maybe_mark_dynamic(encoded, 0)  # another packing must not recompile
        masked = layout.fully_masked(rank)
        return cls(
            encoded,
            layout.places(rank).to(device) if places else None,
            None if masked is None else masked.to(device),
            layout.counted(rank).to(device) if layout.real else None,
        )


@dataclass(frozen=True)
class ShardedPass:
    """What the layers of a model know of one sharded forward pass."""

    layout: SequenceLayout
    segments: Segments  # the layout for recurrent layers; what they store with it is freed when the pass ends
    group: ContextGroup
    config: BurstConfig  # with the memory settings that were chosen for the pass
    laid: LaidTokens  # the layout as tensors
    causal: bool = True  # whether queries see no later keys
    way: Way = "states"  # the schedule by which recurrent layers exchange data
    masks: tuple[Any, ...] = ()  # a wrapper's masks of the whole sequence, if they have blocks, such as images


@dataclass(frozen=True)
class LayerContext:
    """What a layer knows of its run."""

    sharded_pass: ShardedPass | None = None  # `None` where every rank holds whole sequences
    replay: ReplayBuffer | None = None  # what recurrent layers received in the first run of a checkpoint
    cache: AttentionCache | None = None  # what the innermost checkpoint saves of its attention
    tile: int = 0  # the most tokens that an MLP takes at a time; 0 for all
    obstacles: dict[int, str] = field(default_factory=dict)  # reasons not to tile, by the id of a forward in tiles
    cached: ShardedCache | None = None  # stores keys, in a pass of an answer over ranks

    def of_checkpoint(self, cache: AttentionCache | None) -> "LayerContext":
        """Returns the context of a checkpoint inside this one."""
        seen = self.sharded_pass
        keeps = seen is not None and seen.config.memory_settings.attention_keep > 0
        return replace(self, replay=ReplayBuffer(self.replay, keeps), cache=cache)


# passes and checkpoints that have begun in this thread, innermost last; each pass with the one that will end it, which
# it does not keep alive
_OPEN: ContextVar[tuple[tuple[ref[Any] | None, LayerContext | None], ...]] = ContextVar(
    "hf_burst_layer_contexts", default=()
)


def current() -> LayerContext | None:
    """Returns the context in which this thread runs a layer; `None` outside passes and checkpoints."""
    return _current_of_thread() if torch.compiler.is_compiling() else _innermost()


def _innermost() -> LayerContext | None:
    contexts = _OPEN.get()
    return contexts[-1][1] if contexts else None


_current_of_thread = torch.compiler.disable(_innermost)  # graphs cannot read it


@torch.compiler.disable
def current_call() -> LayerContext | None:
    """Returns the same for what also runs outside of the model's call, such as masks that `generate` prepares; `None`
    if an interrupted pass has left its context."""
    contexts = _OPEN.get()
    owner, context = contexts[-1] if contexts else (None, None)
    patch = None if owner is None else owner()
    return context if owner is None or (patch is not None and patch.is_called()) else None


@contextmanager
def entered(context: LayerContext | None) -> Iterator[None]:
    """Runs the `with` block in a context."""
    before = _OPEN.get()
    _OPEN.set((*before, (None, context)))
    try:
        yield
    finally:
        _OPEN.set(before)


def begin_pass(owner: Any, context: LayerContext | None) -> None:
    """Enters the context of a pass of `owner`, or none where every rank holds whole sequences."""
    _OPEN.set((*_OPEN.get(), (ref(owner), context)))


def end_pass(owner: Any) -> None:
    """Leaves it; does nothing outside a pass. An interrupted pass ends when its owner begins the next one, or is gone;
    passes that others have begun meanwhile stay open."""
    _OPEN.set(tuple(each for each in _OPEN.get() if each[0] is None or each[0]() not in (None, owner)))


def change_pass(sharded_pass: ShardedPass) -> None:
    """Replaces the pass that layers of the current pass see."""
    *outer, (owner, context) = _OPEN.get()
    assert context is not None, "in a pass"
    _OPEN.set((*outer, (owner, replace(context, sharded_pass=sharded_pass))))


class CheckpointedRun:
    """The function of a checkpoint. All its runs share one context, made inside the context of the first run."""

    def __init__(
        self,
        function: Callable[..., Any],  # the layer, or several
        cache: AttentionCache | None,  # what is saved of its attention
        advise: Callable[[BaseException | None], None],  # called with an error before it is raised
    ) -> None:
        self.function, self.cache, self.advise = function, cache, advise
        self.context: LayerContext | None = None  # set by the first run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # graphs need no context
            return self.function(*args, **kwargs)
        return self._run(args, kwargs, for_output=False)

    def for_output(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function again for its output alone, without a graph."""
        return self._run(args, kwargs, for_output=True)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], for_output: bool) -> Any:
        again = self.context is not None
        if self.context is None:
            self.context = (current() or LayerContext()).of_checkpoint(self.cache)
        if again:  # what it writes, such as keys that layers of Gemma 4 share, would hold its graph for the whole pass
            named = getattr(self.function, "keywords", {}) | kwargs  # Transformers binds them
            kwargs = {name: copy(each) if isinstance(each, MutableMapping) else each for name, each in named.items()}
        if self.cache is not None:
            self.cache.start(again, for_output)
        if self.context.replay is not None:
            self.context.replay.start()
        with entered(self.context):
            try:
                return self.function(*args, **kwargs)
            except BaseException as problem:
                self.advise(problem)
                raise


def refuse_blind_run(module: nn.Module) -> None:
    """Raises if a checkpoint that is not ours runs a module in the backward pass without its context."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"A {type(module).__name__} runs again in the backward pass, by a checkpoint that does not tell it how the "
            "sequence is sharded. Checkpoint whole layers: model.gradient_checkpointing_enable()."
        )
