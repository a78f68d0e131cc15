"""The stages of one forward pass of a patched model, which `_Patch` of `patch.py` runs:

    call        what the caller asks for                                 a [`Call`]             `_call`
    look        parts collect modules, if these have changed                                    `_cut`
    admit       parts raise for what is not served, or add facts                                `_cut`
    cut         joins texts that begin alike, lays them over the ranks   a [`Batch`]            `_cut`
                and cuts them
    check       parts raise for batches that are not served, or add facts                       `_cut`
    agree       the ranks compare all facts, in the first message                               `_agree`
    settle      settings that depend on the batches of all ranks         a [`ForwardPass`]      `_settle`
    begin       parts prepare for the pass                                                      `_begin`
    arguments   parts replace arguments of the model                                            `_begin`
    run         the model
    after       outputs of this rank's tokens become outputs of the batch                       `after`
    end         parts drop the pass, also a failed one                                          `end`

Models that take images have their tokens cut inside of their forward, before the decoder (`parts/tokens.py`).

Each value is frozen: only the stage that makes it writes it. Parts add to the call's [`Agreement`] until ranks agree.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import BurstConfig, Memory
from ..layers.loss import IGNORE_INDEX
from ..plan.recurrence import Way
from ..ranks.group import Agreement, ContextGroup
from ..ranks.layout import SequenceLayout
from .batches.documents import cache_of
from .callers import ROUNDS, trainer_among
from .context import ShardedPass
from .models.task import Task
from .sharded_cache import ShardedCache
from .spread.value import Spread
from .spread.where import Where
from .view import ModelView, device_of


class Question(NamedTuple):
    """What is asked of a pass: logits and a loss, a number for each token in their place, or embeddings."""

    facts: dict[str, Any]  # on which the ranks must agree
    numbers: Callable[[Spread, Tensor], Tensor] | None = None  # from scores and targets of its tokens
    pooling: str | None = None  # which states represent a document, if embeddings are requested


LOSS = Question({})


@dataclass(frozen=True)
class Call:
    """What the caller of a model asks for."""

    view: ModelView
    group: ContextGroup  # the ranks that share the batch
    config: BurstConfig
    task: Task
    given: Mapping[str, Any]  # the arguments of the model by name
    compiled: bool  # whether torch.compile runs the pass, or a module in it
    agreement: Agreement
    asked: Question

    @property
    def needs_states(self) -> bool:
        """Whether results come from hidden states, not from a language-model head."""
        return self.task.reads or self.asked.pooling is not None

    @property
    def model(self) -> PreTrainedModel:
        return self.view.root

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def learns(self) -> bool:
        """Whether this is a training pass, which a backward pass follows."""
        return self.model.training and torch.is_grad_enabled()

    @property
    def cache(self) -> ShardedCache | None:
        """The cache among the arguments; the part `Arguments` refuses others."""
        return cache_of(self.given)

    @property
    def items(self) -> Tensor | float | None:
        """`num_items_in_batch`."""
        return self.given.get("num_items_in_batch")

    @cached_property
    def trainer_and_readers(self) -> tuple[Any | None, tuple[str, ...]]:
        """The `Trainer` that runs this epoch or evaluation, and its user's functions that read logits of this pass.
        First asked for within the pass."""
        return trainer_among(ROUNDS)

    @property
    def multiplies_losses(self) -> bool:
        """Whether a loss that uses `num_items_in_batch` is multiplied by the number of processes, the default."""
        trainer, _ = self.trainer_and_readers
        return trainer is None or bool(trainer.args.average_tokens_across_devices)

    @cached_property
    def random_rates(self) -> list[tuple[str, float]]:
        """The result of [`random_rates`], saved because several parts read it and there are thousands of modules."""
        return list(random_rates(self.view.modules))

    @cached_property
    def sharing(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups over which FSDP2 shards weights and that have ranks outside the batch's group. All of these
        ranks must call their collectives in one order, whatever batch a rank has."""
        if not dist.is_initialized() or dist.get_world_size() == self.group.size:
            return ()
        meshes = {weight.device_mesh for weight in self.model.parameters() if isinstance(weight, DTensor)}
        groups = {group.group_name: group for mesh in meshes for group in mesh.get_all_groups()}
        members = set(self.group.members) or {dist.get_rank()}
        ranks = dist.get_process_group_ranks
        outside = [group for group in groups.values() if not members.issuperset(ranks(group))]
        return tuple(sorted(outside, key=lambda group: (ranks(group), group.group_name)))  # the same on all ranks

    def largest(self, numbers: Sequence[float], of_all: bool = True) -> list[float]:
        """Returns the largest of each number over the ranks that share the batch and, if `of_all`, over those that
        share weights. All of these ranks call it at the same time."""
        groups = () if self.group.size == 1 else (self.group.process_group,)
        groups = (*groups, *self.sharing) if of_all else groups
        if not groups:
            return [float(number) for number in numbers]
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor.tolist()


@dataclass(frozen=True)
class Batch:
    """What this rank computes of a batch."""

    given: Mapping[str, Any]  # the arguments for all tokens: as the caller gave them, or for one row of joined texts
    lies: Where
    sharded: bool  # whether the batch arrived sharded
    inputs: Mapping[str, Any]  # the model's arguments on this rank
    way: Way  # the schedule by which recurrent layers exchange data
    targets: Tensor | None = None  # what this rank's tokens predict; `None` if the model's head gets the labels

    @property
    def layout(self) -> SequenceLayout:
        return self.lies.layout

    @cached_property
    def label_count(self) -> int:
        """Number of labels that count on this rank."""
        if self.targets is None:
            return 0
        counts = self.lies.counts
        return int((self.targets != IGNORE_INDEX).sum()) if counts is None else int(counts.sum())


@dataclass(frozen=True)
class Checkpoints:
    """How the layers of a model checkpoint in a pass."""

    count: int = 0  # of layers that do
    repeatable: bool = False  # whether all layers do, and can run again for their output alone
    selective: bool = False  # whether some use the user's `context_fn`, which may save outputs of operators


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass on which all ranks have agreed."""

    call: Call
    batch: Batch
    checkpoints: Checkpoints
    memory: Memory  # the settings that were chosen for this batch
    label_count: int  # labels that count on all ranks
    seed: int  # of dropout
    sharded_pass: ShardedPass  # what layers know of the pass

    @property
    def group(self) -> ContextGroup:
        return self.call.group

    @property
    def model(self) -> PreTrainedModel:
        return self.call.model

    @property
    def device(self) -> torch.device:
        return self.call.device


def random_rates(modules: Iterable[nn.Module]) -> Iterator[tuple[str, float]]:
    """Yields name and value of all rates above 0 that make training random: `p` of dropout layers, and attributes."""
    for module in modules:
        for name, value in vars(module).items() if module.training else ():
            name = type(module).__name__.lower() if name == "p" else name
            if "drop" in name or "jitter" in name:
                rates = value.values() if isinstance(value, dict) else (value,)
                yield from ((name, rate) for rate in rates if isinstance(rate, float) and rate > 0)
