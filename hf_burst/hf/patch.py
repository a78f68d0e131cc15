"""`patch_model` and `unpatch_model`: how a model comes to compute its attention over several ranks, and back.

A patched model takes full batches, the same on every rank of a group, and returns what one process would. To a trainer
the ranks look like data-parallel replicas with the same batch. All of it is done by parts, see [`Part`].
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..config import BurstConfig
from ..errors import ConfigError
from ..mesh import ContextGroup
from ..resources import resources_of
from .accelerate import PATCH, check_joined, resolve_group
from .attention import CALL_KEY
from .cutting import CutPoint, bound_arguments, cut_point_of
from .hybrid import attention_shapes, hybrid_of, recurrent_sizes
from .parts.adapters import Adapters
from .parts.attention import Attention
from .parts.base import ForwardPass, Part
from .parts.checkpointing import Checkpointing
from .parts.dropout import DropoutStreams
from .parts.experts import RouterLogits
from .parts.loss import Loss
from .parts.memory import Memory, advise_on_memory
from .parts.outputs import Outputs
from .parts.recurrence import Recurrence
from .parts.replicas import Replicas
from .parts.request import Request
from .parts.rope import LongestPosition
from .parts.tiles import Tile, TiledMLP
from .parts.token_losses import TokenLosses
from .parts.tokens import Tokens
from .sharded import is_sharded
from .support import base_model, check_adapters, check_model, verdict_on
from .task import task_of

AnyModel = TypeVar("AnyModel", bound=nn.Module)
_COMPILED = (
    "Compile the model on all ranks or on none (torch_compile, torch.compile), or name a schedule, "
    "such as BurstConfig(schedule='kv_ring')."
)


def patch_model(
    model: AnyModel, config: BurstConfig | None = None, mesh: DeviceMesh | dist.ProcessGroup | None = None
) -> AnyModel:
    """Swaps a model's attention for BurstAttention over the ranks that share a sequence.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A causal or masked language model, changed in place; before it is
            wrapped by a data-parallel wrapper.
        config ([`BurstConfig`], *optional*): The settings.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that share a sequence (the dimension `"cp"` of a
            mesh). By default, at the first forward pass, those of accelerate's state ([`BurstParallelismConfig`]), else
            all ranks; in one process nothing is communicated.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If the model is not served exactly.
        ConfigError: If it is patched already with another config or mesh. With the same ones nothing changes.

    Example:

    ```python
    >>> model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B"))
    ```
    """
    return _apply(model, config or BurstConfig(), None if mesh is None else ContextGroup.from_mesh(mesh))


def patch_under_check(model: AnyModel, tile: int = 0) -> AnyModel:
    """As [`patch_model`], for a class that is being compared with one process, whether it is served or not.

    Args:
        model (`PreTrainedModel`): Changed in place.
        tile (`int`, defaults to 0): Tokens that an MLP takes at a time; 0 for all.
    """
    return _apply(model, BurstConfig(gradients="averaged_by_hand", tiled_mlp=tile), None, verdict="under check")


def _apply(model: AnyModel, config: BurstConfig, group: ContextGroup | None, verdict: str = "") -> AnyModel:
    base = base_model(model)
    check_adapters(model)
    there: _Patch | None = getattr(base, PATCH, None)
    if there is not None and (there.config, there.group) == (config, group) and not verdict:
        return model  # a cell of a notebook that runs again
    if there is not None:
        raise ConfigError(
            f"The model is patched already, with {there.config} and {_named(there.group)}; now {config} and "
            f"{_named(group)} were given. Call hf_burst.unpatch_model(model) before patching it anew."
        )
    check_model(base)
    patch = _Patch(base, config, group, verdict or verdict_on(base))
    try:
        patch.install(base)
    except BaseException:
        patch.remove(base)
        raise
    setattr(base, PATCH, patch)
    return model


def _named(group: ContextGroup | None) -> str:
    return "no mesh" if group is None else f"a mesh of {group.size} ranks"


def unpatch_model(model: AnyModel) -> AnyModel:
    """Puts back everything that [`patch_model`] changed.

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
    patch.remove(base)
    delattr(base, PATCH)
    return model


def make_parts(
    model: PreTrainedModel, config: BurstConfig, group: ContextGroup | None, cut_point: CutPoint
) -> tuple[Part, ...]:
    """The parts of a model in the order of their steps. A new capability is a new part and a line here."""
    tile = Tile()
    return (
        Request(),
        Replicas(config),
        Attention(model),
        Tokens(model, cut_point),
        LongestPosition(model),
        Memory(model, config),
        Checkpointing(tile),
        TiledMLP(tile),
        Adapters(),
        Recurrence(model),  # when all is known of the pass
        RouterLogits(model),
        Loss(model, group),
        TokenLosses(),
        Outputs(),  # gathers after the loss was computed from the outputs of this rank
        DropoutStreams(),  # draws seeds last, when nothing stops the pass any more
    )


def _generates(model: PreTrainedModel, batch: Mapping[str, Any]) -> bool:
    """Whether a pass is a step of `generate`, in which every rank holds the whole prompt, with Transformers' own
    attention."""
    learns = model.training and torch.is_grad_enabled()
    cached = batch.get("past_key_values") is not None or bool(batch.get("use_cache"))
    return cached and not learns and batch.get("labels") is None and not is_sharded(batch)


def _compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` runs this pass, or one of the modules in it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":  # of torch._dynamo, by whatever was compiled
            return True
        frame = frame.f_back
    modules: list[nn.Module | None] = [model]
    while modules:  # `model.modules()` takes several times as long, at every pass
        module = modules.pop()
        if module is None:
            continue
        by_function = "_orig_mod" in module._modules
        if by_function or module._compiled_call_impl is not None:
            return True
        modules += module._modules.values()
    return False


class _Patch:
    """What patching added to one model: a list of parts, and the three hooks of the model that run it."""

    def __init__(self, model: PreTrainedModel, config: BurstConfig, group: ContextGroup | None, verdict: str) -> None:
        self.config, self.group, self.verdict, self.task = config, group, verdict, task_of(model)
        self.task.check_config(config, type(model).__name__)
        cut_point = cut_point_of(model)
        self.parts = make_parts(model, config, group, cut_point)
        self.recurrent, self.shapes = recurrent_sizes(model), attention_shapes(model)
        self.token_inputs = (*cut_point.inputs, *(extra for part in self.parts for extra in part.token_inputs))
        self.handles: list[RemovableHandle] = []
        self.explicit = False  # whether the latest batch arrived sharded
        self.run: ForwardPass | None = None  # the pass under way
        self.passes = 0  # that came so far

    def install(self, model: PreTrainedModel) -> None:
        for part in self.parts:
            self.handles += part.install(model)
        self.handles += [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
        ]

    def remove(self, model: PreTrainedModel) -> None:
        self.end()  # a pass that was interrupted
        for handle in self.handles:
            handle.remove()
        for part in reversed(self.parts):
            part.remove(model)

    @torch.compiler.disable
    def before(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook: checks the batch, agrees with the other ranks, and cuts it."""
        if getattr(module, "_is_replica", False):
            raise ConfigError(
                "The model runs under torch.nn.DataParallel (one process with several GPUs), over which no sequence "
                "can be sharded. Launch one process a GPU: accelerate launch --num_processes N script.py."
            )
        self.end()  # a pass that was interrupted does not come there
        batch: dict[str, Any] = {}
        error: Exception | None = None
        try:
            batch = bound_arguments(module, args, kwargs)
        except Exception as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        if self.task.generates and _generates(module, batch):
            return (), batch
        self.passes += 1
        run = ForwardPass(module, resolve_group(self.group), self.config, self.task, self.token_inputs, batch)
        run.facts["served by"] = self.verdict
        run.compiled = _compiled(module)
        if self.config.schedule == "auto" and run.group.size > 1:  # graphs take another one, see `with_schedule`
            run.facts["compiled"], run.advice["compiled"] = run.compiled, _COMPILED
        mode = run.facts["mode"] = "training" if module.training else "evaluation"
        doing = f"forward pass {self.passes} of {type(module).__name__} in {mode}"
        self.meet(run, error, doing)
        try:
            if error is None and run.group.size > 1:  # the first time all ranks meet in it, so before any of them fails
                machine = resources_of(run.group).machine(run.device, self.config.kernel, self.config.ranks_per_host)
                run.hybrid = hybrid_of(self.recurrent, self.shapes, machine, self.config)
            check_joined()
            for part in self.parts if error is None else ():
                part.prepare(run)
        except Exception as problem:
            error = problem
        run.tokens = run.group.agree(run.facts, error, run.device, run.labels, run.checksums, run.advice, doing)
        self.run, self.explicit = run, run.explicit
        for part in self.parts:
            part.begin(run)
        return (), {**run.inputs, CALL_KEY: run.call}

    def meet(self, run: ForwardPass, error: Exception | None, doing: str) -> None:
        """At the first pass over a group all of its ranks have come so far, or none goes on to measure the machine."""
        if run.group.size == 1 or resources_of(run.group).knows(run.device, self.config.kernel):
            return
        facts = {"BurstConfig": str(self.config), "recurrent layers": ", ".join(map(str, self.recurrent)) or "none"}
        run.group.agree(facts, error, run.device, doing=doing)

    @torch.compiler.disable
    def after(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: outputs of the whole batch, in sequence order."""
        if self.run is None:
            return output
        if kwargs.get("labels") is not self.run.inputs.get("labels"):
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
        """The forward hook that is called even if the pass failed."""
        advise_on_memory(sys.exception())
        self.run = None
        for part in self.parts:
            part.end()
