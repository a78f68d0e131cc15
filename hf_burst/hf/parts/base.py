"""The life cycle of a part, and the forward pass that the parts prepare together."""

import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...config import BurstConfig, Memory
from ...errors import ConfigError
from ...plan import Hybrid
from ...plan.recurrence import Way
from ...ranks.group import ContextGroup
from ...ranks.layout import SequenceLayout
from ..context import ForwardCall
from ..models.cut_point import TokenInput
from ..models.hybrid import chosen_way
from ..models.task import Task

Handles = Sequence[RemovableHandle]


@dataclass
class ForwardPass:
    """One forward pass of a patched model, from the batch that came in to the call of the model."""

    model: PreTrainedModel
    group: ContextGroup  # the ranks that share the batch
    config: BurstConfig
    task: Task
    token_inputs: Sequence[TokenInput]  # cut at the cut point of the model
    batch: dict[str, Any] = field(default_factory=dict)  # the arguments as the caller gave them, by name
    inputs: dict[str, Any] = field(default_factory=dict)  # the arguments that the model is given on this rank
    explicit: bool = False  # whether the batch arrived sharded
    layout: SequenceLayout = field(init=False)
    settings: Memory = field(init=False)  # those of the config; from `begin` on with what was chosen for this batch
    compiled: bool = False  # whether torch.compile runs it, or a module in it
    repeatable: bool = False  # whether all layers checkpoint so that they can run again for their output alone
    selective: bool = False  # whether layers checkpoint by a context_fn of the user's, which may keep some outputs
    hybrid: Hybrid | None = None  # of a model with recurrent layers over several ranks
    facts: dict[str, Any] = field(default_factory=dict)  # must be equal on all ranks, see `ContextGroup.agree`
    checksums: dict[str, torch.Tensor] = field(default_factory=dict)  # scalars that must be equal, too
    advice: dict[str, str] = field(default_factory=dict)  # what to do if the ranks differ in a fact or a checksum
    labels: int = 0  # that count, on this rank
    tokens: int = 0  # labels that count over all ranks; known from `begin` on
    call: ForwardCall = field(init=False)  # what layers know of the pass; from `begin` on
    obstacles: dict[str, str] = field(default_factory=dict)  # to tiles, see [`LayerContext`]

    def __post_init__(self) -> None:
        self.settings = self.config.memory_settings

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def sharing(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of other ranks than those of the batch, over which FSDP2 shards weights. Their collectives
        must come in one order on all of these ranks, whatever batch a rank has."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == self.group.size:
            return ()
        meshes = {weight.device_mesh for weight in self.model.parameters() if isinstance(weight, DTensor)}
        groups = {group.group_name: group for mesh in meshes for group in mesh.get_all_groups()}
        members = set(self.group.members) or {dist.get_rank()}
        ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        order = sorted((own, name) for name, own in ranks.items() if not set(own) <= members)  # the same on all ranks
        return tuple(groups[name] for _, name in order)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of the numbers of the ranks that share the batch, which all call it at the same time."""
        return self._largest(numbers, () if self.group.size == 1 else (self.group.process_group,))

    def largest_of_all(self, numbers: Sequence[float]) -> list[float]:
        """The largest of the numbers of the ranks that share the batch, or `sharing` weights, at the same time."""
        own = () if self.group.size == 1 else (self.group.process_group,)
        return self._largest(numbers, (*own, *self.sharing))

    def _largest(self, numbers: Sequence[float], groups: Sequence[dist.ProcessGroup]) -> list[float]:
        if not groups:
            return [float(number) for number in numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        most: list[float] = tensor.tolist()
        return most

    @cached_property
    def way(self) -> Way:
        """How recurrent layers pass what they know."""
        if self.hybrid is not None:
            return chosen_way(self.hybrid, self.layout, self.group.rank)
        return "states"

    @property
    def targets(self) -> torch.Tensor | None:
        """What this rank's tokens are to predict, `(batch, n)`."""
        return self.inputs.get(self.task.targets)

    @property
    def items(self) -> torch.Tensor | float | None:
        """`num_items_in_batch` of this pass."""
        return self.inputs.get("num_items_in_batch")


class Part:
    """One capability of a patched model. A part overrides the steps of its life that concern it.

    Making a part looks at the model and may refuse it. Nothing is changed before `install`. What a part knows of single
    modules it takes up in `look`, for they may be exchanged. For each forward pass the parts take the same step one
    after another, in the order of the list in `patch.py`:

        (look ->) prepare -> (the ranks agree) -> begin -> (the model runs) -> after -> end
    """

    token_inputs: tuple[TokenInput, ...] = ()  # to be cut beside those of the model's cut point

    def install(self, model: PreTrainedModel) -> None:
        """Changes the model."""

    def look(self, model: PreTrainedModel) -> Handles:
        """Takes up the modules of the model: after `install`, and before a pass that finds others than the pass before.
        Returns the hooks that it added, which the patch removes. May refuse what it finds, as `prepare` may."""
        return ()

    def prepare(self, run: ForwardPass) -> None:
        """Checks the batch, makes this rank's inputs of it, and adds the facts on which the ranks must agree.

        Every error here reaches all ranks. Parts do not communicate, and what they change in the model
        `remove` puts back.
        """

    def begin(self, run: ForwardPass) -> None:
        """Takes up the state of the pass; all ranks do it, or none. Parts may communicate."""

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        """Changes the outputs of this rank, by name, to those of the whole batch."""

    def end(self) -> None:
        """Drops the state of the pass. Called after every pass, also a failed one, and before the next."""

    def remove(self, model: PreTrainedModel) -> None:
        """Puts back what `install`, or a pass, changed."""


class ForwardOverride:
    """The `forward` of one module, which has it as an attribute. It does not keep this module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigError("The module of this forward is gone. Keep the module, or the model, and call that.")
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForwardOverride":
        return type(self)(*(deepcopy(given, memo) for given in self._given()))

    def __reduce__(self) -> Any:
        return type(self), self._given()

    def _given(self) -> tuple[Any, ...]:
        """What one like it is made of."""
        return (self.module,)
