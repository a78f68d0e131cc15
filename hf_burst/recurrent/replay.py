"""The shards of a layer, and what it received from other ranks, kept for when a checkpoint runs it again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import KernelError
from ..plan import Segment, Segments
from ..ranks.collectives import all_gather
from ..ranks.group import ContextGroup

_Shards = tuple[Tensor, ...]
_Entry = tuple[Any, _Shards]  # shape and dtype of what was sent, and what came


class ReplayBuffer:
    """What one layer received in one forward pass, in order. Where a checkpoint runs the layer again, it sends nothing
    forward: it takes from here what it received first. Gradients pass over the ranks as ever.

    It lives as long as the checkpoint that runs the layer, and keeps nothing for a layer without one.

    Args:
        outer ([`ReplayBuffer`], *optional*): That of a checkpoint around the one of this layer.
        keeps (`bool`, defaults to `True`): Whether anything is kept. Otherwise a layer that runs again receives again.
    """

    def __init__(self, outer: "ReplayBuffer | None" = None, keeps: bool = True) -> None:
        self.outer, self.keeps = outer, keeps
        self.runs = 0  # of the layer, this one included
        self.kept: list[_Entry] = []
        self.place = 0  # of the next entry where the layer runs again

    def start(self) -> None:
        """The layer begins to run, for the first time or again."""
        self.runs += 1
        self.place = 0

    def all_gather(self, tensor: Tensor, group: ContextGroup) -> _Shards:
        """The tensors of all ranks, see [`hf_burst.ranks.collectives.all_gather`]. A layer that runs again sends
        nothing, and its gradients take the same way back.

        Raises:
            KernelError: If the layer, run again, sends otherwise than it did first.
        """
        if group.size == 1:
            return (tensor,)
        kept, own = self._recall(), (tuple(tensor.shape), tensor.dtype)
        if kept is not None and kept[0] != own:
            raise KernelError(
                "A checkpointed layer ran again with states of shape {} ({}), and with {} ({}) before. Let it compute "
                "the same each time, under the same autocast.".format(*own, *kept[0])
            )
        shards = all_gather(tensor, group, None if kept is None else kept[1])
        self._keep((own, tuple(shard.detach() for shard in shards)))
        return shards

    def _recall(self) -> _Entry | None:
        """The next entry of the innermost layer that runs again; `None` if none does."""
        if self.runs < 2 or not self.keeps:
            return self.outer._recall() if self.outer is not None else None
        if self.place == len(self.kept):
            raise KernelError(
                "A checkpointed layer gathered states that it did not gather when it ran first. Let it compute the "
                "same each time, or do without gradient checkpointing."
            )
        self.place += 1
        return self.kept[self.place - 1]

    def _keep(self, entry: _Entry) -> None:
        """Keeps them here, and in the checkpoints around, as far as these run for the first time."""
        if self.runs == 1 and self.keeps:
            self.kept.append(entry)
            if self.outer is not None:
                self.outer._keep(entry)


@dataclass(frozen=True)
class Shards:
    """Where the tokens of a batch lie, and the ranks that exchange what their layers know of them."""

    segments: Segments  # those of all ranks
    group: ContextGroup
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)  # of a layer that a checkpoint may run again

    @property
    def own(self) -> Sequence[Segment]:
        """The segments of this rank."""
        return self.segments.by_rank[self.group.rank]

    @property
    def exports(self) -> set[int]:
        """The segments of this rank that pass something on; the first one, to nobody, if there are none. All ranks
        send, so that all join the backward pass."""
        return {index for rank, index in self.segments.slots if rank == self.group.rank} or {0}
