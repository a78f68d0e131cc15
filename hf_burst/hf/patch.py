"""`patch_model` and `unpatch_model`: make a model compute its attention over several ranks, and undo it.

A patched model takes full batches, the same on every rank of a group, and returns what one process would. A trainer
sees the ranks as data-parallel replicas with the same batch. Parts do all of the work, see [`Part`].
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..config import BurstConfig, Memory
from ..errors import ConfigError, UnsupportedModelError
from ..kernels.tuning import tune_in_parallel
from ..layers.surroundings import instead
from ..ranks.group import Agreement, ContextGroup
from ..ranks.watch import watch_of_process
from ..ring.resources import resources_of
from .admission import check_adapters, served_by
from .batches.cutting import bound_arguments
from .batches.documents import cache_of
from .batches.sharded import is_sharded
from .callers import is_within, within_compiled
from .context import PASS_KEY, LayerContext, begin_pass, current, end_pass
from .forward_pass import LOSS, Batch, Call, ForwardPass, Question
from .groups import PATCH, check_processes_met, resolve_group
from .models.cut_point import reader_of
from .models.layer_sizes import recurrent_sizes
from .models.support import base_model, check_model
from .models.task import task_of
from .overrides import remove_overrides
from .parts.adapters import Adapters
from .parts.arguments import Arguments
from .parts.arrivals import Arrivals
from .parts.attention import Attention
from .parts.base import Args, Kwargs, Part
from .parts.checkpointing import Checkpointing
from .parts.dropout import DropoutStreams
from .parts.expert_ranks import ExpertRanks
from .parts.experts import RouterLogits
from .parts.frozen_experts import FrozenExperts
from .parts.fsdp2 import Fsdp2
from .parts.gated_norms import GatedNorms
from .parts.head import Head
from .parts.key_cache import KeyCache, begin_step, each_once
from .parts.loss import Loss
from .parts.memory import MemoryRule
from .parts.recurrence import Recurrence
from .parts.replicas import Replicas
from .parts.rope import LongestPosition
from .parts.states import States
from .parts.tiles import TiledMLP
from .parts.tokens import Tokens
from .parts.towers import Towers
from .sharded_cache import ShardedCache
from .view import ModelView, walk

AnyModel = TypeVar("AnyModel", bound=nn.Module)
_COMPILED = (
    "Compile the model on all ranks or on none (torch_compile, torch.compile), or name a schedule, "
    "such as BurstConfig(schedule='kv_ring')."
)


def patch_model(
    model: AnyModel, config: BurstConfig | None = None, group: DeviceMesh | dist.ProcessGroup | None = None
) -> AnyModel:
    """Replaces a model's attention by BurstAttention over the ranks that share a sequence.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A causal or masked language model, changed in place. Patch it before
            you put it into a data-parallel wrapper.
        config ([`BurstConfig`], *optional*): The settings.
        group (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that share a sequence (the dimension `"cp"` of a
            mesh). By default, the first forward pass takes those of accelerate's state ([`BurstParallelismConfig`]),
            else all ranks; one process communicates nothing.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If the model is not served exactly.
        ConfigError: If it is already patched with another config or group. With the same ones nothing changes.

    Example:

    ```python
    >>> model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B"))
    ```
    """
    return _apply(model, config or BurstConfig(), None if group is None else ContextGroup.from_mesh(group))


def patch_under_check(model: AnyModel, tile: int = 0) -> AnyModel:
    """Does what [`patch_model`] does, served or not, for a class that is being compared with one process, with MLPs
    that take `tile` tokens at a time."""
    return _apply(model, BurstConfig(gradients="manual", memory=Memory(tiled_mlp=tile)), None, verdict="under check")


def _apply(model: AnyModel, config: BurstConfig, group: ContextGroup | None, verdict: str = "") -> AnyModel:
    base = base_model(model)
    check_adapters(model)
    there: _Patch | None = getattr(base, PATCH, None)
    if there is not None:
        if (there.config, there.group) == (config, group) and not verdict:
            return model  # a notebook cell that runs again
        raise ConfigError(
            f"The model is patched already, with {there.config} and {there.group}, and now {config} and {group} were "
            "given. Call hf_burst.unpatch_model(model) before patching it anew."
        )
    view = ModelView(base)
    check_model(view)
    patch = _Patch(view, config, group, verdict or served_by(view))
    try:
        patch.install(view)
    except BaseException:
        patch.remove(view)
        raise
    setattr(base, PATCH, patch)
    if dist.is_initialized() and dist.get_world_size() > 1:
        watch_of_process()  # another rank may come to the first pass alone
    return model


def unpatch_model(model: AnyModel) -> AnyModel:
    """Restores everything that [`patch_model`] changed.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A patched model, changed in place.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model is not patched.
    """
    base = base_model(model)
    patch: _Patch | None = getattr(base, PATCH, None)
    if patch is None:
        raise ConfigError(
            "The model is not patched, so there is nothing to undo. hf_burst.patch_model(model) patches it."
        )
    patch.remove(ModelView(base))
    delattr(base, PATCH)
    return model


def _given(
    module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Any], ShardedCache | None, Exception | None]:
    """Returns the arguments of a call by name, the cache over ranks among them, and what was wrong with them."""
    given, cache = dict[str, Any](), None
    try:
        given = bound_arguments(module, args, kwargs)
        found = cache_of(given)
        cache = found if isinstance(found, ShardedCache) else None
        if cache is not None and not cache.is_read:
            given = each_once(cache, given)
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        return given, cache, problem
    return given, cache, None


def _generates(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Returns whether a pass is a step of `generate`, where every rank holds the whole prompt and Transformers' own
    attention runs."""
    learns = model.training and torch.is_grad_enabled()
    cached = cache_of(batch) is not None or bool(batch.get("use_cache"))
    return cached and not learns and batch.get("labels") is None and not is_sharded(batch)


def _refuse_strange_runs(model: nn.Module) -> None:
    """Raises for runs that the ranks cannot even agree to refuse."""
    if getattr(model, "_is_replica", False):
        raise ConfigError(
            "The model runs under torch.nn.DataParallel (one process with several GPUs), over which no sequence "
            "can be sharded. Launch one process a GPU: accelerate launch --multi_gpu --num_processes N script.py."
        )
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedModelError(
            "torch.func (grad, jvp, vmap) does not reach through attention over ranks. Take gradients by "
            "loss.backward() or torch.autograd.grad, or unpatch the model (hf_burst.unpatch_model)."
        )


class _Patch:
    """What patching added to one model: a list of parts, and the hooks of the model that run them."""

    def __init__(self, view: ModelView, config: BurstConfig, group: ContextGroup | None, verdict: str) -> None:
        self.config, self.group, self.verdict, self.task = config, group, verdict, view.find(task_of)
        self.task.check_config(config, type(view.root).__name__)
        self.memory, self.streams = MemoryRule(config), DropoutStreams()
        self.tokens = Tokens(view, self.streams)
        self.checkpointing, self.tiles = Checkpointing(self.memory.advise), TiledMLP()
        self.parts = self.make_parts(view)
        self.view = view  # of the latest pass
        self.handles: list[RemovableHandle] = []
        self.looked: list[RemovableHandle] = []  # hooks on inner modules
        self.explicit = False  # whether the latest batch arrived sharded
        self.entered = False  # whether the model is being called, sharded or to generate
        self.run: ForwardPass | None = None  # the pass under way
        self.labels: torch.Tensor | None = None  # the labels that the model gets in it
        self.passes = 0  # so far
        self.asked = LOSS  # of the next pass
        # returns what this thread calls in a rollout of the first rank to have all ranks generate, or None
        self.together: Callable[[], Callable[..., Any] | None] | None = None

    def make_parts(self, view: ModelView) -> tuple[Part, ...]:
        """Returns the parts of a model in the order of their steps. A new capability is a new part and a line here."""
        return (
            Arguments(),
            Replicas(self.config),
            ExpertRanks(),
            Attention(view),
            Arrivals(),
            Recurrence(),
            GatedNorms(),
            self.memory,
            self.tokens,
            Towers(),
            LongestPosition(),
            KeyCache(),
            self.checkpointing,
            FrozenExperts(),  # before tiles of them
            self.tiles,
            Adapters(),
            RouterLogits(view.root),  # adds to the loss
            Loss(view, self.group),
            States(self.task),
            Head(),  # gathers or drops what the parts before it have read
            Fsdp2(),  # sees all outputs
            self.streams,  # draws seeds last, when nothing can stop the pass
        )

    def install(self, view: ModelView) -> None:
        for part in self.parts:
            part.install(view)
        model = view.root
        self.look(view)
        inner = dict.fromkeys((model.base_model, reader_of(view).root))
        self.handles += [
            module.register_forward_pre_hook(self.within, with_kwargs=True) for module in inner if module is not model
        ]
        self.handles += [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
        ]

    def remove(self, view: ModelView) -> None:
        self.end()  # ends an interrupted pass
        for handle in (*self.handles, *self.looked):
            handle.remove()
        remove_overrides(view)
        for part in reversed(self.parts):
            part.remove(view)

    @torch.compiler.disable
    def before(self, module: PreTrainedModel, args: Args, kwargs: Kwargs) -> Any:
        """Forward pre-hook: runs the stages of `forward_pass.py` up to the model's own forward."""
        _refuse_strange_runs(module)
        self.end()  # an interrupted pass has not called it
        self.entered = True
        given, cache, error = _given(module, args, kwargs)
        if cache is not None and cache.is_read:  # a new token
            begin_step(cache, given)
            begin_pass(self, LayerContext(cached=cache))
            return (), given
        if cache is None and self.task.generates and _generates(module, given):  # whole prompts, on every rank
            begin_pass(self, None)
            return (), given
        if self.together is not None and self.together() is not None:
            raise ConfigError(
                "The first rank of a group calls the model in a rollout or a reward, and the others would not take "
                "part. They do in model.generate and hf_burst.generate, called with tensors, numbers and text."
            )
        call = self._call(module, given, error)
        batch, error = self._cut(call, error)
        labels, seed = self._agree(call, batch, error)
        assert batch is not None, "or its error was raised"
        self.run = self._settle(call, batch, labels, seed)
        return (), self._begin(self.run, cache)

    def ask(self, question: Question, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Returns the outputs of a pass that answers a question; `model` is the patched one, with its wrappers."""
        with instead(question, "asked", self):
            return model(**inputs)

    def _call(self, module: PreTrainedModel, given: Mapping[str, Any], error: Exception | None) -> Call:
        """Returns what is asked of a pass. All ranks meet here if none has asked for hosts yet."""
        self.passes += 1
        modules, compiled = walk(module)
        view = self.view if self.view.is_of(modules) else ModelView(module)
        group, mode = resolve_group(self.group), "training" if module.training else "evaluation"
        agreement = Agreement({"served by": self.verdict, "mode": mode, **self.asked.facts})
        call = Call(view, group, self.config, self.task, given, compiled or within_compiled(), agreement, self.asked)
        if self.config.schedule == "auto" and group.size > 1:  # graphs take another schedule, see `with_schedule`
            agreement.add("compiled", call.compiled, _COMPILED)
        if not resources_of(group).knows_hosts:  # all ranks must have arrived before any asks for hosts
            sizes = ", ".join(map(str, view.find(recurrent_sizes))) or "none"
            group.agree({"recurrent layers": sizes}, error, call.device, doing=self._doing(call))
        return call

    def _doing(self, call: Call) -> str:
        return f"forward pass {self.passes} of {type(call.model).__name__} in {call.agreement.facts['mode']}"

    def _cut(self, call: Call, error: Exception | None) -> tuple[Batch | None, Exception | None]:
        """Returns what this rank computes of a call, after all parts have admitted and checked it, or an error, which
        all ranks are to hear."""
        if error is not None:
            return None, error
        try:
            if call.view is not self.view:
                self.look(call.view)
            if call.group.size > 1:  # all ranks meet here for the first time, so before any can fail
                resources_of(call.group).ranks_per_host(call.device)
            check_processes_met()
            for part in self.parts:
                part.admit(call)
            batch = self.tokens.cut(call)
            for part in self.parts:
                part.check(call, batch)
        except Exception as problem:
            return None, problem
        return batch, None

    def _agree(self, call: Call, batch: Batch | None, error: Exception | None) -> tuple[int, int]:
        """Returns how many labels all ranks count, and the seed of dropout. Raises any rank's error on all of them."""
        facts = call.agreement
        compared = facts.checksums, facts.advice, self._doing(call), facts.seed
        return call.group.agree(facts.facts, error, call.device, batch.label_count if batch else 0, *compared)

    def _settle(self, call: Call, batch: Batch, labels: int, seed: int) -> ForwardPass:
        """Returns the pass over a batch, on which all ranks have agreed."""
        self.explicit = batch.sharded
        checkpoints = self.checkpointing.found
        memory = self.memory.choose(call, batch, checkpoints)
        return ForwardPass(call, batch, checkpoints, memory, labels, seed, self.tokens.for_layers(call, batch, memory))

    def _begin(self, run: ForwardPass, cache: ShardedCache | None) -> dict[str, Any]:
        """Prepares all parts and the layers for a pass, and returns the model's arguments."""
        if run.device.type == "cuda":  # not when patching: a notebook's processes are forks, and want CUDA untouched
            tune_in_parallel()
        for part in self.parts:
            part.run = run
            part.begin(run)
        arguments = dict(run.batch.inputs)
        for part in self.parts:
            arguments |= part.arguments(run)
        self.labels = arguments.get("labels")
        seen, tile = run.sharded_pass, run.memory.tiled_mlp
        begin_pass(self, LayerContext(seen, tile=tile, obstacles=self.tiles.obstacles, cached=cache))
        apart = self.task.reads and reader_of(self.view) is not self.view  # the reader gets it where it is called
        return {**arguments, **({} if apart else {PASS_KEY: seen})}

    def within(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Forward pre-hook of the decoder: handles calls of the decoder alone."""
        if PASS_KEY in kwargs or _generates(module, kwargs) or self.is_called():
            return
        size = resolve_group(self.group).size
        if size > 1:
            raise UnsupportedModelError(
                f"{type(module).__name__} was called past the hooks of its patched model, which cut the batch, so each "
                f"of {size} ranks would hold whole sequences. Call the model itself, not model.model (with "
                "output_hidden_states=True it returns hidden states of the whole batch) nor model.forward (AdaLoRA)."
            )
        self._begin_outside()

    def is_called(self) -> bool:
        """Returns whether the model is being called; an interrupted call has not reported its end."""
        if not self.entered or self.run is None or self.run.call.compiled:
            return self.entered
        return is_within(lambda module: getattr(module, PATCH, None) is self)

    @torch.compiler.disable
    def _begin_outside(self) -> None:
        """Leaves any pass, also an interrupted one, because layers are called outside of a pass."""
        self.end()
        begin_pass(self, None)

    def look(self, view: ModelView) -> None:
        """Lets the parts look at the model's modules anew."""
        for handle in self.looked:
            handle.remove()
        self.looked = []
        for part in self.parts:
            self.looked += part.look(view)
        self.view = view

    @torch.compiler.disable
    def after(self, module: PreTrainedModel, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Forward hook: returns the outputs of the whole batch, in sequence order."""
        context = current()
        if self.run is None:
            if context is not None and context.cached is not None:
                output.logits = context.cached.end_step(output.logits)
            return output
        if kwargs.get("labels") is not self.labels:
            raise ConfigError(
                "A forward pre-hook changed the labels after the batch was cut over the ranks, too late for the loss. "
                "Register it before hf_burst.patch_model(model): it then sees the whole batch."
            )
        outputs = dict(output.items())
        for part in self.parts:
            part.after(self.run, outputs)
        return type(output)(**outputs)

    @torch.compiler.disable
    def end(self, *_: Any) -> None:
        """Forward hook that ends the pass, even if it failed."""
        self.run = self.labels = None
        self.entered = False
        end_pass(self)
        for part in self.parts:
            part.end()
            part.run = None
