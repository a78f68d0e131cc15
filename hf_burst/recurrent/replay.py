"""A layer's shards, and the tensors it received from other ranks, saved for recomputation by a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import KernelError
from ..plan import Segment, Segments
from ..ranks.collectives import Gathered, all_gather
from ..ranks.group import ContextGroup

_Entry = tuple[Any, Gathered]  # shape and dtype of the tensor sent, and the tensors received


class ReplayBuffer:
    """The tensors that one layer received in one forward pass, in order. When a checkpoint recomputes the layer, it
    reads them from here instead of communicating. Gradients still travel over the ranks.

    It lives as long as the layer's checkpoint, and saves nothing for a layer without one.

    Args:
        outer ([`ReplayBuffer`], *optional*): The buffer of a checkpoint around this layer's.
        keeps (`bool`, defaults to `True`): Whether to save anything. Otherwise a recomputed layer communicates again.
    """

    def __init__(self, outer: "ReplayBuffer | None" = None, keeps: bool = True) -> None:
        self.outer, self.keeps = outer, keeps
        self.runs = 0  # runs of the layer, including the current one
        self.kept: list[_Entry] = []
        self.place = 0  # index of the next entry in a recomputation

    def start(self) -> None:
        """Starts a run of the layer, the first one or a recomputation."""
        self.runs += 1
        self.place = 0

    def all_gather(self, tensor: Tensor, group: ContextGroup) -> Gathered:
        """Gathers the tensors of all ranks, see [`hf_burst.ranks.collectives.all_gather`]. A recomputed layer sends
        nothing forward, but its gradients travel back as usual.

        Raises:
            KernelError: If the recomputed layer sends something different.
        """
        if group.size == 1:
            return (tensor,)
        own = tuple(tensor.shape), tensor.dtype
        shards = all_gather(tensor, group, self._recall(own))
        self._keep((own, tuple(shard.detach() for shard in shards)))
        return shards

    def _recall(self, own: Any) -> Gathered | None:
        """Returns what the innermost recomputed layer received for such a tensor, or `None` if none is recomputed."""
        if self.runs < 2 or not self.keeps:
            return self.outer._recall(own) if self.outer is not None else None
        if self.place == len(self.kept):
            raise KernelError(
                "A checkpointed layer gathered states that it did not gather when it ran first. Let it compute the "
                "same each time, or do without gradient checkpointing."
            )
        before, received = self.kept[self.place]
        if before != own:
            raise KernelError(
                "A checkpointed layer ran again with states of shape {} ({}), and with {} ({}) before. Let it compute "
                "the same each time, under the same autocast.".format(*own, *before)
            )
        self.place += 1
        return received

    def _keep(self, entry: _Entry) -> None:
        """Saves the entry here and in the outer checkpoints that run for the first time."""
        if self.runs == 1 and self.keeps:
            self.kept.append(entry)
            if self.outer is not None:
                self.outer._keep(entry)


@dataclass(frozen=True)
class Shards:
    """The segments of a batch, and the ranks whose layers exchange states."""

    segments: Segments  # of all ranks
    group: ContextGroup
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)  # for a layer that a checkpoint may recompute

    @property
    def own(self) -> Sequence[Segment]:
        """The segments of this rank."""
        return self.segments.by_rank[self.group.rank]

    @property
    def exports(self) -> set[int]:
        """This rank's segments with a successor; if there are none, the first segment, which nobody reads. All ranks
        send, so that all join the backward pass."""
        return {index for rank, index in self.segments.slots if rank == self.group.rank} or {0}
