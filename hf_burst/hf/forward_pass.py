"""One forward pass of a patched model: what the parts prepare together before the model runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import BurstConfig, Memory
from ..layers.loss import IGNORE_INDEX
from ..ranks.group import ContextGroup
from ..ranks.layout import SequenceLayout
from .batches.documents import cache_of
from .batches.joining import Joined
from .context import ForwardCall
from .groups import device_of
from .models.cut_point import TokenInput
from .models.task import Task
from .spread.where import Where
from .view import ModelView


@dataclass
class Batch:
    """The batch of a pass, as it came and as this rank computes it.

    Args:
        given (`dict`): The arguments of the model by name, as the caller gave them, or of one row of joined texts.
        token_inputs (sequence of [`TokenInput`]): Those with a row for each token.
        inputs (`dict`): The arguments that the model is given on this rank.
        sharded (`bool`): Whether it arrived sharded.
        labels (`int`): Labels that count, on this rank.
        tokens (`int`): Labels that count over all ranks; known from `begin` on.
        joined ([`Joined`], *optional*): The texts that were joined, if any begin alike.
    """

    given: dict[str, Any]
    token_inputs: Sequence[TokenInput]
    inputs: dict[str, Any] = field(default_factory=dict)
    layout: SequenceLayout = field(init=False)
    sharded: bool = False
    labels: int = 0
    tokens: int = 0
    joined: Joined | None = None

    @property
    def items(self) -> torch.Tensor | float | None:
        """`num_items_in_batch`."""
        return self.inputs.get("num_items_in_batch")

    @property
    def cache(self) -> Any:
        """The cache that was given."""
        return cache_of(self.given)


@dataclass(frozen=True)
class Checkpoints:
    """How the layers of a model checkpoint in a pass.

    Args:
        layers (`int`, defaults to 0): How many do; 0 without checkpoints.
        repeatable (`bool`, defaults to `False`): Whether all layers do, in a way that lets them run again for their
            output alone.
        selective (`bool`, defaults to `False`): Whether some do by a `context_fn` of the user's, which may keep outputs
            of operators.
    """

    layers: int = 0
    repeatable: bool = False
    selective: bool = False


@dataclass
class Agreement:
    """What must be equal on all ranks that share the batch, see `ContextGroup.agree`.

    Args:
        facts (`dict`): Values by name.
        checksums (`dict`): Scalars on the device, by name; nobody waits for them before the ranks compare.
        advice (`dict`): What to do if the ranks differ in a fact or a checksum.
        seed (`int`, defaults to 0): Of dropout; that of the first rank counts, from `begin` on.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, torch.Tensor] = field(default_factory=dict)
    advice: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def add(self, name: str, value: Any, advice: str = "") -> None:
        """Adds a fact or, if it is a tensor, a checksum, and what to do if the ranks differ in it."""
        (self.checksums if isinstance(value, torch.Tensor) else self.facts)[name] = value
        if advice:
            self.advice[name] = advice


@dataclass
class ForwardPass:
    """One forward pass of a patched model.

    Args:
        view ([`ModelView`]): The model.
        group ([`ContextGroup`]): The ranks that share the batch.
        config ([`BurstConfig`]): The settings of the model.
        task ([`Task`]): What the model learns.
        batch ([`Batch`]): What it computes.
        settings ([`Memory`]): Those of the config; from `begin` on those chosen for this batch.
        checkpoints ([`Checkpoints`]): How layers checkpoint, as the part `Checkpointing` finds in `prepare`; read from
            `begin` on.
        agreement ([`Agreement`]): What the ranks compare before any of them runs the model.
        compiled (`bool`): Whether torch.compile runs it, or a module in it.
        call ([`ForwardCall`]): What layers know of the pass; from `begin` on.
        obstacles (`dict`): To tiles, see [`LayerContext`].
        pooling (`str`, *optional*): Which states stand for a document, if nothing else is asked for.
    """

    view: ModelView
    group: ContextGroup
    config: BurstConfig
    task: Task
    batch: Batch
    settings: Memory = field(init=False)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    agreement: Agreement = field(default_factory=Agreement)
    compiled: bool = False
    call: ForwardCall = field(init=False)
    obstacles: dict[str, str] = field(default_factory=dict)
    pooling: str | None = None

    def __post_init__(self) -> None:
        self.settings = self.config.memory_settings

    @property
    def model(self) -> PreTrainedModel:
        model: PreTrainedModel = self.view.root
        return model

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def targets(self) -> torch.Tensor | None:
        """What this rank's tokens are to predict, `(batch, n)`; `None` where a model's own head has the labels."""
        return self.batch.inputs.get(self.task.targets)

    @cached_property
    def lies(self) -> Where:
        """Where the tokens of the batch lie."""
        return Where(self.batch.layout, self.group, self.batch.joined)

    @property
    def counted_labels(self) -> int:
        """The labels that count on this rank."""
        targets, counts = self.targets, self.lies.counts
        if targets is None:
            return 0
        return int((targets != IGNORE_INDEX).sum()) if counts is None else int(counts.sum())

    @cached_property
    def random_rates(self) -> list[tuple[str, float]]:
        """Those of [`random_rates`]; there are thousands of modules, and several parts ask."""
        return list(random_rates(self.view.modules))

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

    def largest(self, numbers: Sequence[float], of_all: bool = True) -> list[float]:
        """The largest of the numbers of the ranks that share the batch, and if `of_all` of those that share weights,
        which all call it at the same time."""
        groups = () if self.group.size == 1 else (self.group.process_group,)
        groups = (*groups, *self.sharing) if of_all else groups
        if not groups:
            return [float(number) for number in numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        largest: list[float] = tensor.tolist()
        return largest


def random_rates(modules: Iterable[nn.Module]) -> Iterator[tuple[str, float]]:
    """Names and values of all rates above 0 by which training is random: `p` of dropout layers, and attributes."""
    for module in modules:
        for name, value in vars(module).items() if module.training else ():
            name = type(module).__name__.lower() if name == "p" else name
            if "drop" in name or "jitter" in name:
                rates = value.values() if isinstance(value, dict) else (value,)
                yield from ((name, rate) for rate in rates if isinstance(rate, float) and rate > 0)
