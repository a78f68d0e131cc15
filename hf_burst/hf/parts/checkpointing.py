"""Activation checkpointing that computes attention once, and whose layers can save tensors on the host.

The backward pass runs a checkpointed layer again, and for long sequences most of that is attention. So the first
run's attention output, and one number per row and head, are saved. The function by which the layer checkpoints is
wrapped, so that each run of the layer has its context. Hooks on saved tensors offload them and the inputs of layers.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention import AttentionCache
from ...errors import ConfigError
from ...layers.host_memory import HostMemory
from ...layers.layer_runs import LayerRun, Place, first_tensor, place_of
from ...layers.offload import SavedByLayer, detached_leaf, saved_in_place
from ...plan.layer_sizes import keeping
from ...plan.memory_levels import HOST_ROOM
from ..context import CheckpointedRun, current
from ..forward_pass import Batch, Call, Checkpoints, ForwardPass
from ..models.layer_sizes import dtype_of_states, layer_sizes
from ..view import ModelView
from .base import Part
from .replicas import takes_weights_apart

logger = logging.getLogger(__name__)

# names of the checkpoint function in Transformers' layers, and in torch's CheckpointWrapper
_OF_LAYERS, _OF_WRAPPERS = "_gradient_checkpointing_func", "checkpoint_fn"
# arguments of `torch.utils.checkpoint.checkpoint`, beside those of the layer
_OPTIONS = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop"}


class Checkpointing(Part):
    """What the checkpointed layers of a model save for the backward pass, and where.

    They save their inputs, and as much attention as `Memory.attention_keep` says: each run of a layer has its own
    [`AttentionCache`], which lives as long as the graph of that run. With `Memory.activation_offloading`, the first
    layers save both on the host. With `Memory.layers_per_checkpoint`, some layers do not save their input, see
    [`LayerRun`].
    """

    def __init__(self, advise: Callable[[BaseException | None], None]) -> None:
        self.share = 1.0
        self.advise = advise  # on running out of memory
        self.host: HostMemory | None = None
        self.reserved = self.asked = self.room = 0  # bytes of the host, on every rank; last asked for; found then
        self.logged = False  # whether the log says that fewer layers are offloaded
        self.count = self.offloading = self.started = 0  # that checkpoint; that offload in this pass; that have run
        self.per_checkpoint = 1
        self.found = Checkpoints()  # in this pass
        self.selective = False  # whether a module checkpoints by the user's context_fn
        self.latest: LayerRun | None = None
        # of the latest run, until the next layer runs: meanwhile its address is not reused
        self.output: tuple[torch.Tensor, Place] | None = None
        self.hook: RemovableHandle | None = None  # of the embeddings, in this pass

    def check(self, call: Call, batch: Batch) -> None:
        memory, trains = call.config.memory_settings, call.learns
        share, offloading = memory.attention_keep, memory.activation_offloading
        if trains and self.host is not None and self.host.refused is not None:
            raise self.host.refused
        wrapped = self.wrap(call.view)
        repeatable = bool(wrapped) and not call.compiled and all(function.repeatable for function in wrapped)
        repeatable = repeatable and _checkpoint_all_layers(call.view, wrapped)
        self.found = Checkpoints(len(wrapped), repeatable, self.selective)
        again = memory.layers_per_checkpoint > 1
        settings = f"tiled_mlp={memory.tiled_mlp}, layers_per_checkpoint={memory.layers_per_checkpoint}"
        ConfigError.refuse(
            (
                offloading and (call.compiled or not wrapped) and trains,
                f"Memory(activation_offloading={offloading}) offloads what checkpointed layers keep, and nothing of "
                "compiled layers. Call model.gradient_checkpointing_enable(), and leave out torch.compile.",
            ),
            (
                (again or memory.tiled_mlp) and takes_weights_apart(call.view),
                f"Memory({settings}) runs modules again in the backward pass, where DeepSpeed ZeRO-3 or FSDP1 has "
                "taken their weights apart. Train by FSDP2 or ZeRO-2, or set tiled_mlp=0 and layers_per_checkpoint=1.",
            ),
            (
                again and not repeatable and trains,
                f"Memory({settings}) is for layers that all checkpoint, with use_reentrant=False, no context_fn, and "
                "no torch.compile. Set TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs="
                "{'use_reentrant': False}).",
            ),
            (
                trains
                and any(function.options.get("use_reentrant") is not False for function in wrapped)
                and any(getattr(module, "is_kv_shared_layer", False) for module in call.view.modules),
                "Layers of this model take keys of others, whose gradients reentrant checkpoints lose (in Transformers "
                "alone, too). Set TrainingArguments(gradient_checkpointing_kwargs={'use_reentrant': False}).",
            ),
        )
        keep = sum(function.options.get("use_reentrant") is False for function in wrapped if share)
        call.agreement.add("activation checkpointing", f"{len(wrapped)} modules, {keep} of them keep attention")
        self.count = len(wrapped)

    def begin(self, run: ForwardPass) -> None:
        self.share, self.per_checkpoint = run.memory.attention_keep, run.memory.layers_per_checkpoint
        apart = run.memory.activation_offloading or self.per_checkpoint > 1
        if apart and self.count and torch.is_grad_enabled():
            self._prepare_host(run)
            # after the hook by which Transformers makes the embeddings require a gradient when weights do not
            embeddings = run.model.get_input_embeddings()
            self.hook = embeddings.register_forward_hook(lambda module, inputs, output: detached_leaf(output))

    def end(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self.latest, self.output, self.started, self.offloading, self.per_checkpoint = None, None, 0, 0, 1

    def remove(self, view: ModelView) -> None:
        for module in view.modules:
            for name in (_OF_LAYERS, _OF_WRAPPERS):
                function = vars(module).get(name)
                if isinstance(function, _Checkpoint):
                    setattr(module, name, function.function)

    def wrap(self, view: ModelView) -> list["_Checkpoint"]:
        """Wraps the functions of all modules that now checkpoint, and returns those of the outermost layers."""
        functions, outermost, inside = [], [], set[int]()
        for module in view.modules:
            for name in (_OF_LAYERS, _OF_WRAPPERS):
                own = vars(module)
                if name in own and (name == _OF_WRAPPERS or (module.gradient_checkpointing and module.training)):
                    if not isinstance(own[name], _Checkpoint):
                        setattr(module, name, _Checkpoint(own[name], self, module))
                    functions.append(own[name])
                    layer = name == _OF_WRAPPERS or isinstance(module, GradientCheckpointingLayer)
                    if layer and id(module) not in inside:  # outermost first
                        outermost.append(own[name])
                        inside.update(map(id, view.inside(module)))
        if functions or view.root.training:  # an evaluation may come before the backward pass of a step
            self.selective = any("context_fn" in function.options for function in functions)
        return outermost or functions  # the model itself has one, too

    def layer(self, inputs: Sequence[Any]) -> LayerRun | None:
        """Returns the run of a layer that begins with these inputs; `None` inside another layer, or if all layers save
        everything on the device."""
        context = current()
        inside = context is not None and context.cache is not None
        if not (self.offloading or self.per_checkpoint > 1) or self.host is None or inside:
            return None
        latest, index = self.latest, self.started
        self.started += 1
        saved = SavedByLayer(self.host, index < self.offloading)
        run = self.latest = LayerRun(saved, inputs)
        keeps = keeping(index + 1, self.count, self.per_checkpoint) > keeping(index, self.count, self.per_checkpoint)
        if latest is not None and self.output is not None and not keeps:
            run.follow(latest, self.output[1])
        if latest is not None:  # the backward pass runs it next, after any layer that computes its input
            saved.following = (latest.start if run.before is None else latest).saved
        self.output = None
        return run

    def _prepare_host(self, run: ForwardPass) -> None:
        """Reserves host memory for what layers save. If a host has less than the config demands, all ranks raise. If
        the number of offloaded layers was chosen by the rule, as many as needed stay on the GPU. The last layer always
        does, because the backward pass reads it at once."""
        wanted = self.offloading = min(round(run.memory.activation_offloading * self.count), self.count - 1)
        if self.host is None or self.host.device != run.device:
            self.host, self.reserved, self.asked = HostMemory(run.device), 0, 0
        chosen = run.memory.activation_offloading != run.call.config.memory_settings.activation_offloading
        needed = self._bytes_of_host(run, wanted)
        if chosen and needed > self.reserved:
            if needed != self.asked:  # once for batches of one size; others may have taken memory since
                smallest = -run.call.largest([-HOST_ROOM * self.host.most], of_all=False)[0]
                self.asked, self.room = needed, max(self.reserved, int(smallest))
            while self.offloading and self._bytes_of_host(run, self.offloading) > self.room:
                self.offloading -= 1
        if self.offloading < wanted and run.group.rank == 0 and not self.logged:
            self.logged = True
            logger.warning(
                "The host has too little memory for each process, so %d instead of %d layers are offloaded, and the "
                "GPU may run out of memory. Give the host more memory, or run fewer jobs on it.",
                *(self.offloading, wanted),
            )
        needed = self._bytes_of_host(run, self.offloading)
        if needed > self.reserved:
            with run.group.agreeing(run.device, "a reservation of host memory"):
                self.host.reserve(needed)
            self.reserved = needed

    def _bytes_of_host(self, run: ForwardPass, leaving: int) -> int:
        """Returns the host bytes of what the first `leaving` layers save: inputs, and attention outputs with the
        log-sum-exp of their rows, as a mean over layers with and without attention."""
        sizes, itemsize = run.call.view.find(layer_sizes), dtype_of_states(run.call.view).itemsize
        narrow = min(itemsize, 2) if run.device.type == "cuda" else itemsize  # GPU kernels return 16 bits
        rows = run.batch.layout.batch_size * run.batch.layout.sharding.most_tokens
        page = HostMemory.page_bytes  # each tensor takes whole pages
        attention = rows * self.share * sizes.q_heads * (sizes.value_dim * narrow + 4) + 2 * page
        inputs = keeping(leaving, self.count, self.per_checkpoint) * (rows * sizes.hidden * itemsize + page)
        return round(inputs + leaving * sizes.attending / sizes.layers * attention)


def _checkpoint_all_layers(view: ModelView, functions: Sequence["_Checkpoint"]) -> bool:
    """Returns whether each layer in training checkpoints, or lies inside one that does."""
    inside = {id(module) for function in functions for module in view.inside(function.module)}
    return all(id(layer) in inside for layer in view.layers if layer.training)


class _Checkpoint:
    """A function that checkpoints, such as a partial of `torch.utils.checkpoint.checkpoint`, whose runs all have a
    context of their own."""

    def __init__(self, function: Callable[..., Any], part: Checkpointing, module: nn.Module) -> None:
        self.function, self.part, self.module = function, part, module
        self.options: dict[str, Any] = getattr(function, "keywords", {})
        # a compiled graph saves the results of our operator, but not those of other operators
        self.in_graphs = partial(create_selective_checkpoint_contexts, [torch.ops.hf_burst.attention.default])

    @property
    def repeatable(self) -> bool:
        """Whether a layer can run again for its output alone."""
        return self.options.get("use_reentrant") is False and "context_fn" not in self.options

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self.repeatable and self.part.share == 1 and "context_fn" not in kwargs:
                kwargs["context_fn"] = self.in_graphs
            return self.function(CheckpointedRun(run, None, self.part.advise), *args, **kwargs)  # graphs may break
        named = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        if not torch.is_grad_enabled():  # also when a layer runs again for its output alone
            return run(*args, **named)
        options, layer, cache = {**self.options, **kwargs}, self.part.layer(args), None
        if options.get("use_reentrant") is False:  # a reentrant checkpoint runs first without a graph
            cache = AttentionCache(self.part.share, saved_in_place if layer is None else layer.saved.save)
        again = CheckpointedRun(run, cache, self.part.advise)
        if layer is None:
            return self.function(again, *args, **kwargs)
        if self.part.per_checkpoint > 1:
            for_output = partial(self._gathered, again.for_output)
            layer.may_run_again(for_output, args, named, options.get("preserve_rng_state", True))
        with layer.hooks():
            output = self.function(again, *args, **kwargs)
        if self.part.per_checkpoint > 1 and type(hidden := first_tensor(output)) is torch.Tensor:
            self.part.output = hidden, place_of(hidden)
        return output

    def _gathered(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the layer in the backward pass, before FSDP2 gathers its weights for it."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()
        return run(*args, **kwargs)
