"""Layers that carry a state from token to token: in this model, their functions compute over the ranks."""

import inspect
import logging
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...plan import RecurrentSize
from ...plan.recurrence import Way
from ...ranks.layout import SequenceLayout
from ...recurrent import fla_kernels
from ..admission import ON_GPUS
from ..attention import ARRIVED
from ..batches.documents import CACHE_KEYS
from ..context import PASS_KEY, LayerContext, current, refuse_blind_run
from ..forward_pass import Call, ForwardPass
from ..models.bypassed import check_recurrent_sources, function_name
from ..models.layer_sizes import chosen_way, recurrent_sizes
from ..models.recurrent import functions_of, over_ranks, recurrent_modules
from ..overrides import Override
from ..view import ModelView
from .base import Args, Handles, Kwargs, Part

logger = logging.getLogger(__name__)

NO_FORKS = "the kernels of its recurrent layers begin with no state"
_REPLACED = (
    "The forward of a {} was replaced by {}, so its state would not pass from rank to rank. Put its own back. If the "
    "model is patched by then, call hf_burst.unpatch_model(model), and patch it anew."
)


class Recurrence(Part):
    """Gives recurrent modules a forward over ranks."""

    def __init__(self) -> None:
        self.warned = False

    def look(self, view: ModelView) -> Handles:
        check_recurrent_sources(view)
        _put(view)
        return ()

    def admit(self, call: Call) -> None:
        _put(call.view)  # somebody may have removed it since, such as a model that shares the module
        if call.view.find(recurrent_modules):  # with them, delta rules send other messages
            call.agreement.add("kernels of flash-linear-attention", fla_kernels(call.device, 1) is not None)

    def begin(self, run: ForwardPass) -> None:
        kinds: set[Any] = set(map(type, run.call.view.find(recurrent_modules)))
        unknown = sorted(kind.__name__ for kind in kinds if not set(functions_of(kind.forward)) <= ON_GPUS)
        if unknown and run.device.type == "cuda" and run.group.size > 1 and not self.warned:
            self.warned = True
            logger.warning(
                "Over ranks, %s was compared with one process on CPUs only, not by its kernels for GPUs. Compare the "
                "loss of a batch of yours by hf-burst check --batch.",
                ", ".join(unknown),
            )


def sizes_to_cut(call: Call) -> tuple[RecurrentSize, ...]:
    """Returns the recurrent layers for which a batch is cut; none in one process, or if one kind does not tell."""
    return call.view.find(recurrent_sizes) if call.group.size > 1 else ()


def way_of(call: Call, layout: SequenceLayout) -> Way:
    """Returns the schedule by which recurrent layers exchange data in a pass."""
    sizes = sizes_to_cut(call)
    return chosen_way(sizes, layout, call.group.rank) if sizes else "states"


def forks(view: ModelView) -> bool:
    """Returns whether several continuations of a text may each begin with its final states."""
    sizes = view.find(recurrent_sizes)
    return bool(sizes or not view.find(recurrent_modules)) and all("states" in size.ways for size in sizes)


def _put(view: ModelView) -> None:
    for module in view.find(recurrent_modules):
        _check_forward(module)
        RecurrentForward.put(module)


def _check_forward(module: nn.Module) -> None:
    """Raises if somebody has replaced the forward."""
    there, plain = vars(module).get("forward"), type(module).forward
    other = there if not isinstance(there, RecurrentForward) else None if there.replaces is plain else plain
    if other is not None:
        raise ConfigError(_REPLACED.format(type(module).__name__, function_name(other)))


class RecurrentForward(Override):
    """The forward of a recurrent module: over ranks in the context of a sharded pass, else unchanged."""

    def __init__(self, module: nn.Module, own: Any = None) -> None:
        super().__init__(module, own)
        self.replaces, self.sharded = type(module).forward, over_ranks(type(module))
        self.masks = "attention_mask" in inspect.signature(self.replaces).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(PASS_KEY, None)
        module, context = self.module, current()
        if context is None:
            refuse_blind_run(module)
        if context is None or context.sharded_pass is None:
            return self.plain(*args, **kwargs)
        return self._over_ranks(context, args, kwargs)

    @torch.compiler.disable  # it sends messages; the code around it compiles
    def _over_ranks(self, context: LayerContext, args: Args, kwargs: Kwargs) -> Any:
        assert context.sharded_pass is not None, "asked before"
        vars(self.module)[ARRIVED] = True
        if self.masks:
            kwargs["attention_mask"] = context.sharded_pass.laid.real
        if context.cached is None:  # a cache of Transformers would hold the states of a shard
            kwargs |= {name: None for name in CACHE_KEYS if name in kwargs}
        return self.sharded(self.module, *args, **kwargs)
