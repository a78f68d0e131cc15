"""How blocks move between the ranks of a group: published by their home, fetched by who needs them, and counted.

[`PeerToPeer`] sends and receives (NCCL, gloo). Every rank posts its rounds in the same order, and a message belongs to
the same round at both of its ends, so no rank waits for a round that its peer has not reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from ..mesh import ContextGroup
from ..plan import Traffic

# what a block is: blocks of one kind are published one after another, those of different kinds live side by side
Channel = Literal["visitors", "gradients", "heads in", "heads out"]
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Part:
    """Rows of one of the tensors that `peer` has published.

    Args:
        peer (`int`): A rank of the group.
        shapes (`tuple`): Shape and dtype of every tensor that the peer has published.
        index (`int`): Which of them.
        start, stop (`int`): Its rows, the second dimension.
        batch (`tuple[int, int]`, *optional*): Of which sequences, the first dimension; all by default.
    """

    peer: int
    shapes: tuple[Shape, ...]
    index: int
    start: int
    stop: int
    batch: tuple[int, int] | None = None

    @property
    def shape(self) -> Shape:
        (batch, _, *rest), dtype = self.shapes[self.index]
        first, last = self.batch or (0, batch)
        return (last - first, self.stop - self.start, *rest), dtype


class Posted(Protocol):
    """Messages under way."""

    def wait(self) -> list[torch.Tensor]:
        """What was fetched; on a GPU the current stream waits for it, not the host."""
        ...


class Exchange(Protocol):
    """The messages of one rank in one pass.

    Args:
        sent ([`Traffic`]): What has left this rank so far.
    """

    sent: Traffic

    def room(self, channel: Channel, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Where to put what is published next: writing it there saves a copy."""
        ...

    def publish(self, channel: Channel, tensors: Sequence[torch.Tensor], most: int) -> None:
        """Lets the peers fetch these tensors, which stay as they are until the next ones are published.

        Every rank of the group publishes equally often, possibly nothing.

        Args:
            channel (`str`): What they are.
            tensors (sequence of `torch.Tensor`): What is published.
            most (`int`): As many bytes as any rank will ever publish here; equal on all ranks.
        """
        ...

    def fetch(
        self,
        channel: Channel,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[Part],
        tag: int,
        into: Sequence[torch.Tensor] | None = None,
    ) -> Posted:
        """Starts to fetch.

        Args:
            channel (`str`): Where it was published.
            sends (sequence of `(torch.Tensor, int)`): What of this rank's is fetched in this round, and by which rank.
            receives (sequence of [`Part`]): What this rank fetches, from each peer in the order of its sends.
            tag (`int`): Tells the rounds apart.
            into (sequence of `torch.Tensor`, *optional*): Where it goes; new tensors by default.
        """
        ...


@dataclass
class _Messages:
    """What is sent is kept alive, and must not change, until `wait`."""

    works: list[dist.Work]
    sent: list[torch.Tensor]
    landing: list[torch.Tensor]
    into: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        for place, landed in zip(self.into, self.landing, strict=True):
            if place is not landed:
                place.copy_(landed)
        self.works, self.sent, self.landing = [], [], self.into
        return self.into


@dataclass
class PeerToPeer:
    """An [`Exchange`] by `isend` and `irecv`."""

    group: ContextGroup
    device: torch.device
    sent: Traffic = field(default_factory=Traffic)

    def room(self, channel: Channel, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """See [`Exchange.room`]."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]

    def publish(self, channel: Channel, tensors: Sequence[torch.Tensor], most: int) -> None:
        """See [`Exchange.publish`]; here a tensor leaves when it is fetched."""

    def fetch(
        self,
        channel: Channel,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[Part],
        tag: int,
        into: Sequence[torch.Tensor] | None = None,
    ) -> _Messages:
        """See [`Exchange.fetch`]."""
        tensors = [tensor.contiguous() for tensor, _ in sends]
        if into is None:
            into = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in (p.shape for p in receives)]
        landing = [place if place.is_contiguous() else place.new_empty(place.shape) for place in into]
        process_group = self.group.process_group if sends or receives else None
        operations = [
            dist.P2POp(dist.isend, tensor, group=process_group, tag=tag, group_peer=peer)
            for tensor, (_, peer) in zip(tensors, sends, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=process_group, tag=tag, group_peer=part.peer)
            for tensor, part in zip(landing, receives, strict=True)
        ]
        self.sent += Traffic(len(tensors), sum(tensor.nbytes for tensor in tensors))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Messages(works, tensors, landing, list(into))
