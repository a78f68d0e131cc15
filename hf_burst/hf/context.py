"""What a layer knows of the run that it is in: one value for attention, recurrent layers and tiles.

    patch.before   enters the context of the pass: layers that do not checkpoint run in it
        checkpoint     enters one of its own for each run of its layers, in this thread or in one of autograd:
                       the first run, the run for the output alone, and the run for the graph
    patch.end      leaves it

A layer asks for [`current`]. It knows nothing of checkpoints, and a new kind of layer needs nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..attention import AttentionCache
from ..config import BurstConfig
from ..errors import ConfigError
from ..plan import Segments
from ..plan.recurrence import Way
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from ..recurrent import ReplayBuffer
from .sharded_cache import ShardedCache

CALL_KEY = "burst_call"  # the keyword argument by which a ForwardCall comes into compiled graphs


@dataclass(frozen=True)
class LaidTokens:
    """A layout in tensors on the device of a rank.

    Args:
        encoded (`torch.LongTensor`): As the operator of attention takes it.
        places (`torch.LongTensor` of shape `(batch, n)`, *optional*): Of this rank's tokens in their rows or documents,
            if a layer asks for them.
        fully_masked (`torch.BoolTensor` of shape `(batch, n)`, *optional*): Its tokens that see nothing.
        real (`torch.BoolTensor` of shape `(batch, n)`, *optional*): Those that are not padding, if there is any.
    """

    encoded: torch.Tensor
    places: torch.Tensor | None = None
    fully_masked: torch.Tensor | None = None
    real: torch.Tensor | None = None

    @classmethod
    def of(cls, layout: SequenceLayout, rank: int, device: torch.device, places: bool) -> "LaidTokens":
        """Those of one rank, with places or without."""
        encoded = layout.encode()
        torch._dynamo.maybe_mark_dynamic(encoded, 0)  # another packing is no reason to compile anew
        masked = layout.fully_masked(rank)
        return cls(
            encoded,
            layout.places(rank).to(device) if places else None,
            None if masked is None else masked.to(device),
            layout.counted(rank).to(device) if layout.real else None,
        )


@dataclass(frozen=True)
class ForwardCall:
    """What the layers of a model know of one sharded forward pass.

    Args:
        layout ([`SequenceLayout`]): How the tokens lie over the ranks.
        segments ([`Segments`]): The same for recurrent layers; of this pass alone, so that what layers keep with them
            is freed when it ends.
        group ([`ContextGroup`]): The ranks.
        config ([`BurstConfig`]): The settings, with those of memory that were chosen for the pass.
        tokens ([`LaidTokens`]): The layout in tensors.
        causal (`bool`, defaults to `True`): Whether queries see no later key.
        way (`str`, defaults to `"states"`): How recurrent layers pass what they know.
        masks (tuple of `LazyMask`): Those of the whole sequence that a wrapper made, if they have blocks, as of images.
    """

    layout: SequenceLayout
    segments: Segments
    group: ContextGroup
    config: BurstConfig
    tokens: LaidTokens
    causal: bool = True
    way: Way = "states"
    masks: tuple[Any, ...] = ()

    def replay(self, outer: ReplayBuffer | None = None, keeps: bool = False) -> ReplayBuffer:
        """A buffer for what recurrent layers receive: it keeps nothing, or it is that of a checkpoint."""
        return ReplayBuffer(outer, keeps and self.config.memory_settings.attention_keep > 0)


@dataclass(eq=False)
class OpenPass:
    """One pass of a model: in which context it began, whether it has one of its own, and whether it has not ended."""

    outer: "LayerContext | None"
    sharded: bool = True
    open: bool = True


@dataclass(frozen=True)
class LayerContext:
    """What a layer knows of its run.

    Args:
        call ([`ForwardCall`], *optional*): Of the sharded pass; `None` where every rank holds whole sequences.
        replay ([`ReplayBuffer`], *optional*): What recurrent layers received in the first run; there where `call` is.
        cache ([`AttentionCache`], *optional*): What the innermost checkpoint keeps of its attention.
        tile (`int`, defaults to 0): Most tokens that an MLP takes at a time; 0 for all.
        obstacles (`dict`): To tiles, by the name of a module, as far as they were found in this pass; empty for none.
        within ([`OpenPass`], *optional*): The pass.
        cached ([`ShardedCache`], *optional*): What takes up keys, in a pass of an answer over ranks.
    """

    call: ForwardCall | None = None
    replay: ReplayBuffer | None = None
    cache: AttentionCache | None = None
    tile: int = 0
    obstacles: dict[str, str] = field(default_factory=dict)
    within: OpenPass | None = field(default=None, repr=False)
    cached: ShardedCache | None = None

    def of_checkpoint(self, cache: AttentionCache | None) -> "LayerContext":
        """The context of a checkpoint inside of this one."""
        replay = None if self.call is None else self.call.replay(self.replay, keeps=True)
        return replace(self, replay=replay, cache=cache)


# of each thread: those of autograd start without one
_CURRENT: ContextVar[LayerContext | None] = ContextVar("hf_burst_layer_context", default=None)


def current() -> LayerContext | None:
    """The context in which this thread runs a layer; `None` outside of passes and of checkpoints."""
    return _current_of_thread() if torch.compiler.is_compiling() else _CURRENT.get()


@torch.compiler.disable
def _current_of_thread() -> LayerContext | None:
    return _CURRENT.get()  # which no graph can read


@contextmanager
def entered(context: LayerContext | None) -> Iterator[None]:
    """Runs what is inside in a context."""
    before = _CURRENT.get()
    _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.set(before)


class PassContext:
    """The context of a model's pass, which begins and ends in two hooks of the model. A pass that was interrupted ends
    when the next one of the same model begins. Passes of other models may have begun meanwhile, and they stay."""

    def __init__(self) -> None:
        self.own: OpenPass | None = None  # the pass that has begun and not ended

    def enter(self, context: LayerContext | None) -> None:
        """Enters the context of a pass, or none where every rank holds whole sequences."""
        self.own = OpenPass(_CURRENT.get(), sharded=context is not None)
        _CURRENT.set(None if context is None else replace(context, within=self.own))

    def leave(self) -> None:
        """Goes back to the innermost pass that is still open; does nothing outside of a pass."""
        own, self.own = self.own, None
        if own is None:
            return
        own.open, now = False, _CURRENT.get()
        is_inside = now is None if not own.sharded else now is not None and now.within is own
        if is_inside:
            outer = own.outer
            while outer is not None and outer.within is not None and not outer.within.open:
                outer = outer.within.outer
            _CURRENT.set(outer)

    def __reduce__(self) -> Any:
        return PassContext, ()


def change_call(call: ForwardCall) -> None:
    """Has the layers of the pass that is under way know another call."""
    context = _CURRENT.get()
    assert context is not None, "in a pass"
    _CURRENT.set(replace(context, call=call))


class CheckpointedRun:
    """What a checkpoint runs, first and again: each time in a context of these runs, inside of that in which it runs
    first.

    Args:
        function (callable): The layer, or several.
        cache ([`AttentionCache`], *optional*): What is kept of its attention.
        advise (callable): Is told of an error before it is raised.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        cache: AttentionCache | None,
        advise: Callable[[BaseException | None], None],
    ) -> None:
        self.function, self.cache, self.advise = function, cache, advise
        self.context: LayerContext | None = None  # from the first run on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph has all that it needs
            return self.function(*args, **kwargs)
        return self._run(args, kwargs, for_output=False)

    def for_output(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it once more for its output alone, without a graph."""
        return self._run(args, kwargs, for_output=True)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], for_output: bool) -> Any:
        again = self.context is not None
        if self.context is None:
            self.context = (current() or LayerContext()).of_checkpoint(self.cache)
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
    """Raises in a backward pass, where a checkpoint that is not ours runs a module without its context."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"A {type(module).__name__} runs again in the backward pass, by a checkpoint that does not tell it how the "
            "sequence is sharded. Checkpoint whole layers: model.gradient_checkpointing_enable(), or "
            "gradient_checkpointing=True among the training arguments."
        )
