"""Activation checkpointing that does not compute attention a second time.

A checkpointed layer is run again in the backward pass, and over long sequences its attention is most of that. Its
first output, and one number a row and head, are kept instead: `torch.utils.checkpoint`, by which everyone checkpoints,
is given contexts for both runs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn
from transformers import PreTrainedModel

from ...attention import AttentionCache
from ...errors import BatchError
from .base import ForwardPass, Part

# under which names the layers of Transformers, and torch's CheckpointWrapper, keep the function that checkpoints them
_OF_LAYERS, _OF_WRAPPERS = "_gradient_checkpointing_func", "checkpoint_fn"


class SavedAttention(Part):
    """What the checkpointed layers of a model keep of their attention, by `BurstConfig.attention_keep`. Each run of a
    layer has an [`AttentionCache`] of its own, which lives as long as the graph of that run."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.under_way: dict[int, AttentionCache] = {}

    def prepare(self, run: ForwardPass) -> None:
        modules = self.wrap(run.model) if run.model.training else None
        if modules and 0 < self.share < 1 and run.layout.beginning(1 - self.share) is None:
            raise BatchError(
                f"BurstConfig(attention_keep={self.share}) needs batches of which every rank holds as much of each "
                f"part of the sequence, and this one was cut into {len(run.layout.owners)} chunks by another "
                "BurstConfig. Give the BurstCollator (or shard_batch) the config of the model."
            )
        run.facts["activation checkpointing"] = modules

    def begin(self, run: ForwardPass) -> None:
        run.call = replace(run.call, cache=self.cache)

    def remove(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            for name in (_OF_LAYERS, _OF_WRAPPERS):
                function = vars(module).get(name)
                if isinstance(function, _Remembering):
                    setattr(module, name, function.function)

    def wrap(self, model: nn.Module) -> str | None:
        """Sees to all modules that checkpoint by now, and returns how many they are; `None` for none."""
        wrapped = [
            (module, name)
            for module in model.modules()
            for name in (_OF_LAYERS, _OF_WRAPPERS)
            if name in vars(module) and (name == _OF_WRAPPERS or module.gradient_checkpointing)
        ]
        for module, name in wrapped:
            if self.share and not isinstance(vars(module)[name], _Remembering):
                setattr(module, name, _Remembering(vars(module)[name], self))
        keep = [vars(module)[name].options.get("use_reentrant") is False for module, name in wrapped if self.share]
        return f"{len(wrapped)} modules, {sum(keep)} of which keep attention" if wrapped else None

    def cache(self) -> AttentionCache | None:
        """That of the layer that this thread runs, if it is checkpointed."""
        return self.under_way.get(get_ident())

    def contexts(self, theirs: Callable[[], Sequence[AbstractContextManager[Any]]]) -> tuple["_Run", "_Run"]:
        """The contexts of a layer's forward pass and of its later runs, inside of those of another `context_fn`."""
        cache = AttentionCache(self.share)
        first, again = theirs()
        return _Run(self, cache, None, first), _Run(self, cache, 0, again)


class _Run:
    """The context in which a layer runs; may be entered again. No generator can."""

    def __init__(
        self, saved: SavedAttention, cache: AttentionCache, start: int | None, outer: AbstractContextManager[Any]
    ) -> None:
        self.saved, self.cache, self.start, self.outer = saved, cache, start, outer
        self.before: list[AttentionCache | None] = []

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.before.append(self.saved.cache())
        self.cache.position = self.start
        self.saved.under_way[get_ident()] = self.cache

    def __exit__(self, *error: Any) -> Any:
        before = self.before.pop()
        if before is None:
            del self.saved.under_way[get_ident()]
        else:
            self.saved.under_way[get_ident()] = before
        return self.outer.__exit__(*error)


class _Remembering:
    """A function that checkpoints, such as a partial of `torch.utils.checkpoint.checkpoint`, with contexts. A reentrant
    one takes none."""

    def __init__(self, function: Callable[..., Any], saved: SavedAttention) -> None:
        self.function, self.saved, self.options = function, saved, getattr(function, "keywords", {})
        # in a compiled graph the operator's results are kept, those of other operators are not
        self.in_graphs = partial(create_selective_checkpoint_contexts, [torch.ops.hf_burst.attention.default])

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {**self.options, **kwargs}
        if options.get("use_reentrant") is False and not torch.compiler.is_compiling():
            kwargs["context_fn"] = partial(self.saved.contexts, options.get("context_fn", noop_context_fn))
        elif options.get("use_reentrant") is False and self.saved.share == 1 and "context_fn" not in options:
            kwargs["context_fn"] = self.in_graphs
        return self.function(run, *args, **kwargs)
