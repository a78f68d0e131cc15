"""Activation checkpointing that does not compute attention a second time, and whose layers keep things on the host.

A checkpointed layer is run again in the backward pass, and over long sequences its attention is most of that. Its
first output, and one number a row and head, are kept instead: `torch.utils.checkpoint`, by which everyone checkpoints,
is given contexts for both runs. Hooks on saved tensors offload them and the inputs of layers.
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
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention import AttentionCache
from ...errors import BatchError, ConfigError
from ...offload import PAGE, HostMemory, Kept, KeptByLayer, kept_here
from ..hybrid import attention_shapes
from .base import ForwardPass, Part
from .memory import advise_on_memory
from .tiles import Tile

# under which names the layers of Transformers, and torch's CheckpointWrapper, keep the function that checkpoints them
_OF_LAYERS, _OF_WRAPPERS = "_gradient_checkpointing_func", "checkpoint_fn"


class Checkpointing(Part):
    """What the checkpointed layers of a model keep for the backward pass, and where.

    They keep their inputs, and attention by `BurstConfig.attention_keep`: each run of a layer has an
    [`AttentionCache`] of its own, which lives as long as the graph of that run. By
    `BurstConfig.activation_offloading` the first layers keep both on the host.
    """

    def __init__(self, tile: Tile) -> None:
        self.share, self.tile = 1.0, tile
        self.under_way: dict[int, AttentionCache] = {}
        self.home: HostMemory | None = None
        self.reserved = 0  # bytes of the host, on all ranks
        self.layers = self.leaving = self.begun = 0  # that checkpoint; that offload in this pass; that ran
        self.latest: KeptByLayer | None = None

    def prepare(self, run: ForwardPass) -> None:
        share, offloading = run.config.attention_keep, run.config.activation_offloading
        wrapped = self.wrap(run.model)
        if wrapped and 0 < share < 1 and run.layout.beginning(1 - share) is None:
            raise BatchError(
                f"BurstConfig(attention_keep={share}) needs batches of which every rank holds as much of each "
                f"part of the sequence, and this one was cut into {len(run.layout.owners)} chunks by another "
                "BurstConfig. Give the BurstCollator (or shard_batch) the config of the model."
            )
        if offloading and not wrapped and run.model.training and torch.is_grad_enabled():
            raise ConfigError(
                f"BurstConfig(activation_offloading={offloading}) offloads what checkpointed layers keep, and no "
                "layer checkpoints. Set TrainingArguments(gradient_checkpointing=True), or call "
                "model.gradient_checkpointing_enable()."
            )
        keep = [function.options.get("use_reentrant") is False for function in wrapped if share]
        described = f"{len(wrapped)} modules, {sum(keep)} of which keep attention"
        run.facts["activation checkpointing"] = described if wrapped else None
        self.layers = len(wrapped)

    def begin(self, run: ForwardPass) -> None:
        run.call = replace(run.call, cache=self.cache)
        self.share = run.settings.attention_keep
        if self.layers and run.settings.activation_offloading and torch.is_grad_enabled():
            self._prepare_host(run)

    def end(self) -> None:
        self.latest, self.begun, self.leaving = None, 0, 0

    def remove(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            for name in (_OF_LAYERS, _OF_WRAPPERS):
                function = vars(module).get(name)
                if isinstance(function, _Remembering):
                    setattr(module, name, function.function)

    def wrap(self, model: nn.Module) -> list["_Remembering"]:
        """Sees to all modules that checkpoint by now, and returns the functions by which the layers do."""
        functions, of_layers = [], []
        for module in model.modules():
            for name in (_OF_LAYERS, _OF_WRAPPERS):
                own = vars(module)
                if name in own and (name == _OF_WRAPPERS or (module.gradient_checkpointing and module.training)):
                    if not isinstance(own[name], _Remembering):
                        setattr(module, name, _Remembering(own[name], self))
                    functions.append(own[name])
                    if name == _OF_WRAPPERS or isinstance(module, GradientCheckpointingLayer):
                        of_layers.append(own[name])
        return of_layers or functions  # the model itself has one, too

    def layer(self) -> KeptByLayer | None:
        """What the layer keeps that begins to run; `None` inside of another one, and if nothing is offloaded."""
        if not self.leaving or self.home is None or self.cache() is not None or torch.compiler.is_compiling():
            return None
        self.begun += 1
        self.latest = KeptByLayer(self.home, self.begun <= self.leaving, self.latest)
        return self.latest

    def cache(self) -> AttentionCache | None:
        """That of the layer that this thread runs, if it is checkpointed."""
        return self.under_way.get(get_ident())

    def contexts(
        self, keep: Callable[[torch.Tensor], Kept], theirs: Callable[[], Sequence[AbstractContextManager[Any]]]
    ) -> tuple["_Run", "_Run"]:
        """The contexts of a layer's forward pass and of its later runs, inside of those of another `context_fn`."""
        cache = AttentionCache(self.share, keep)
        first, again = theirs()
        return _Run(self, cache, None, first), _Run(self, cache, 0, again)

    def _prepare_host(self, run: ForwardPass) -> None:
        """Makes room on the host for what layers keep, or raises on all ranks. The last layer keeps it: it is asked for
        at once."""
        if self.home is None or self.home.device != run.device:
            self.home, self.reserved = HostMemory(run.device), 0
        self.leaving = min(round(run.settings.activation_offloading * self.layers), self.layers - 1)
        needed, error = round(self.leaving * _kept_bytes(run, self.share)), None
        if needed > self.reserved:
            try:
                self.home.reserve(needed)
            except Exception as problem:  # whatever it is, the other ranks must not wait for this one
                error = problem
            run.group.agree({}, error, run.device)
            self.reserved = needed


def _kept_bytes(run: ForwardPass, share: float) -> float:
    """Bytes that a layer keeps: its input, what attention returns, and the log-sum-exp of its rows."""
    width, shapes = run.model.config.get_text_config().hidden_size, attention_shapes(run.model)
    embeddings: Any = run.model.get_input_embeddings()
    itemsize = embeddings.weight.element_size()
    attention = 0 if shapes is None else shapes.q_heads * (shapes.value_dim * itemsize + shapes.accumulator_itemsize)
    rows = run.layout.batch_size * run.layout.sharding.most_tokens
    return rows * (width * itemsize + share * attention) + 3 * PAGE  # each of them takes whole pages


class _Run:
    """The context in which a layer runs; may be entered again. No generator can."""

    def __init__(
        self, part: Checkpointing, cache: AttentionCache, start: int | None, outer: AbstractContextManager[Any]
    ) -> None:
        self.part, self.cache, self.start, self.outer = part, cache, start, outer
        self.before: list[AttentionCache | None] = []

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.before.append(self.part.cache())
        self.cache.position = self.start
        self.part.under_way[get_ident()] = self.cache

    def __exit__(self, *error: Any) -> Any:
        advise_on_memory(error[1])
        before = self.before.pop()
        if before is None:
            del self.part.under_way[get_ident()]
        else:
            self.part.under_way[get_ident()] = before
        return self.outer.__exit__(*error)


class _Remembering:
    """A function that checkpoints, such as a partial of `torch.utils.checkpoint.checkpoint`, with contexts. A reentrant
    one takes none."""

    checkpoints = True

    def __init__(self, function: Callable[..., Any], part: Checkpointing) -> None:
        self.function, self.part, self.options = function, part, getattr(function, "keywords", {})
        # in a compiled graph the operator's results are kept, those of other operators are not
        self.in_graphs = partial(create_selective_checkpoint_contexts, [torch.ops.hf_burst.attention.default])

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options, layer = {**self.options, **kwargs}, self.part.layer()
        if not torch.compiler.is_compiling():
            run = self.part.tile.within(run)
        if options.get("use_reentrant") is False and self.part.share:
            if not torch.compiler.is_compiling():
                keep = kept_here if layer is None else layer.keep
                kwargs["context_fn"] = partial(self.part.contexts, keep, options.get("context_fn", noop_context_fn))
            elif self.part.share == 1 and "context_fn" not in options:
                kwargs["context_fn"] = self.in_graphs
        if layer is None:
            return self.function(run, *args, **kwargs)
        with layer.hooks():
            return self.function(run, *args, **kwargs)
