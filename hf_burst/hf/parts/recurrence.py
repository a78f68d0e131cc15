"""Layers that carry a state from token to token: in this model, their functions compute over the ranks."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...plan import Hybrid, RecurrentSize
from ...plan.recurrence import Way
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ...recurrent import fla_kernels
from ..admission import ON_GPUS
from ..attention import ARRIVED
from ..batches.documents import CACHE_KEYS
from ..context import PASS_KEY, LayerContext, current, refuse_blind_run
from ..forward_pass import Agreement, Call, ForwardPass
from ..models.bypassed import check_recurrent_sources, function_name
from ..models.hybrid import chosen_way, recurrent_sizes
from ..models.recurrent import functions_of, over_ranks, recurrent_modules
from ..overrides import Override
from ..view import ModelView
from .base import Handles, Part

logger = logging.getLogger(__name__)

NO_FORKS = "the kernels of its recurrent layers begin with no state"
_REPLACED = (
    "The forward of a {} was replaced by {}, so its state would not pass from rank to rank. Put its own back. If the "
    "model is patched by then, call hf_burst.unpatch_model(model), and patch it anew."
)


class Recurrence(Part):
    """Gives recurrent modules a forward over ranks."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.sizes: tuple[RecurrentSize, ...] = ()  # by kind; empty if one kind does not tell
        self.unknown: list[str] = []
        self.warned = False

    def look(self, view: ModelView) -> Handles:
        check_recurrent_sources(view)
        self.modules = view.find(recurrent_modules)
        self.sizes = view.find(recurrent_sizes)
        kinds = set(map(type, self.modules))
        self.unknown = sorted(kind.__name__ for kind in kinds if not set(functions_of(kind.forward)) <= ON_GPUS)
        return ()

    def overrides(self, view: ModelView) -> Iterator[tuple[type[Override], nn.Module, tuple[Any, ...]]]:
        for module in self.modules:
            _check_forward(module)
            yield RecurrentForward, module, ()

    def admit(self, call: Call, agreement: Agreement) -> None:
        for module in self.modules:
            _check_forward(module)
            RecurrentForward.put(module)  # somebody may have removed it since, such as a model that shares the module
        if self.modules:  # with them, delta rules send other messages
            agreement.add("kernels of flash-linear-attention", fla_kernels(call.device, 1) is not None)

    def hybrid(self, group: ContextGroup) -> Hybrid | None:
        """Returns what a cut must know of the recurrent layers; `None` in one process."""
        return Hybrid(self.sizes) if self.sizes and group.size > 1 else None

    def way(self, layout: SequenceLayout, group: ContextGroup) -> Way:
        """Returns the schedule by which recurrent layers exchange data in a pass."""
        hybrid = self.hybrid(group)
        return "states" if hybrid is None else chosen_way(hybrid, layout, group.rank)

    @property
    def forks(self) -> bool:
        """Whether several continuations of a text may each begin with its final states."""
        known = not self.modules or self.sizes
        return bool(known) and all("states" in size.ways for size in self.sizes)

    def begin(self, run: ForwardPass) -> None:
        if self.unknown and run.device.type == "cuda" and run.group.size > 1 and not self.warned:
            self.warned = True
            logger.warning(
                "Over ranks, %s was compared with one process on CPUs only, not by its kernels for GPUs. Compare the "
                "loss of a batch of yours by hf-burst check --batch.",
                ", ".join(self.unknown),
            )


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
    def _over_ranks(self, context: LayerContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert context.sharded_pass is not None, "asked before"
        vars(self.module)[ARRIVED] = True
        if self.masks:
            kwargs["attention_mask"] = context.sharded_pass.laid.real
        if context.cached is None:  # a cache of Transformers would hold the states of a shard
            kwargs |= {name: None for name in CACHE_KEYS if name in kwargs}
        return self.sharded(self.module, *args, **kwargs)
