"""How blocks move between the ranks of a group: published by their home, fetched by who needs them, and counted.

[`PeerToPeer`] sends and receives (NCCL, gloo). Every rank posts its rounds in the same order, and a message belongs to
the same round at both of its ends, so no rank waits for a round that its peer has not reached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from ..mesh import ContextGroup
from ..plan import Traffic

# what a block is: blocks of one kind are published one after another, those of different kinds live side by side
Channel = Literal["visitors", "gradients", "heads in", "heads out"]
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Incoming:
    """Rows of one of the tensors that `peer` has published.

    Args:
        peer (`int`): A rank of the group.
        shapes (`tuple`): Shape and dtype of every tensor that the peer has published.
        index (`int`): Which of them.
        start, stop (`int`): Its rows, the second dimension.
    """

    peer: int
    shapes: tuple[Shape, ...]
    index: int
    start: int
    stop: int

    @cached_property
    def shape(self) -> Shape:
        """Of the rows."""
        (batch, _, *rest), dtype = self.shapes[self.index]
        return (batch, self.stop - self.start, *rest), dtype


@dataclass(frozen=True)
class Outgoing:
    """Rows `[start, stop)` of the tensor `index` of those that this rank has published, which `peer` fetches."""

    peer: int
    index: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Round:
    """One round of an exchange: who fetches what. Made once, for tensors of given shapes.

    Args:
        shapes (`tuple`): Shape and dtype of every tensor that this rank has published.
        outgoing (`tuple[Outgoing, ...]`): What of them is fetched by others.
        incoming (`tuple[Incoming, ...]`): What this rank fetches, from each peer in the order in which that gives it.
        tag (`int`): Tells the rounds apart.
    """

    shapes: tuple[Shape, ...]
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    tag: int

    @cached_property
    def sent(self) -> Traffic:
        """What leaves this rank."""
        total = 0
        for rows in self.outgoing:
            (batch, _, *rest), dtype = self.shapes[rows.index]
            total += batch * (rows.stop - rows.start) * math.prod(rest) * dtype.itemsize
        return Traffic(len(self.outgoing), total)


@dataclass(frozen=True)
class HeadBlock:
    """Rows and heads of a tensor of shape `(B, S, H, D)` that go to or come from a peer.

    Args:
        peer (`int`): A rank of the group, possibly this one.
        index (`int`): Which of the tensors published.
        rows, heads (`tuple[int, int]`): `[start, stop)` of them.
    """

    peer: int
    index: int
    rows: tuple[int, int]
    heads: tuple[int, int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor."""
        return tensor[:, slice(*self.rows), slice(*self.heads)]


@dataclass(frozen=True)
class HeadMove:
    """A block, and where it goes: rows and heads of the destination of the same index."""

    source: HeadBlock
    rows: tuple[int, int]
    heads: tuple[int, int]


@dataclass(frozen=True, eq=False)
class HeadRound:
    """One round of an exchange in which every rank publishes tensors of the same shapes.

    Args:
        outgoing (`tuple[HeadBlock, ...]`): What peers take of this rank's tensors, in their order.
        incoming (`tuple[HeadMove, ...]`): What this rank takes, itself included.
    """

    outgoing: tuple[HeadBlock, ...]
    incoming: tuple[HeadMove, ...]


class Pending(Protocol):
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

    def room(self, channel: Channel, shapes: Sequence[Shape], most: int) -> Sequence[torch.Tensor | None]:
        """Where the tensors that are published next may be written, so that nothing is copied then.

        Args:
            channel (`str`): What they are.
            shapes (sequence of `(shape, dtype)`): Of all of them; scalars of rows, `(B, S, H, 1)`, lie heads first.
            most (`int`): As in `publish`.

        Returns:
            A tensor each, or `None` where there is no such place.
        """
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
        which: Round,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = None,
    ) -> Pending:
        """Starts to fetch.

        Args:
            channel (`str`): Where it was published.
            which ([`Round`]): What goes where.
            tensors (sequence of `torch.Tensor`): What this rank has published.
            into (sequence of `torch.Tensor`, *optional*): Where it goes; new tensors by default.
        """
        ...

    def move(
        self,
        channel: Channel,
        moves: HeadRound,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        tag: int,
        behind: bool = False,
    ) -> Pending:
        """Starts a round in which heads are exchanged.

        Args:
            channel (`str`): Where `sources` were published.
            moves ([`HeadRound`]): What goes where.
            sources (sequence of `torch.Tensor` of shape `(B, S, H, D)`): What this rank has published; equal shapes
                and dtypes on all ranks.
            into (sequence of `torch.Tensor` of shape `(B, S', H', D)`): The destinations, of any strides.
            tag (`int`): Tells the rounds apart.
            behind (`bool`, defaults to `False`): Whether something is computed meanwhile.
        """
        ...

    def leave(self, posted: Pending) -> None:
        """Does not wait for a round whose memory nobody touches before the next pass over these ranks has begun: by
        then it is there.

        Args:
            posted ([`Pending`]): The round.
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

    def room(self, channel: Channel, shapes: Sequence[Shape], most: int) -> Sequence[None]:
        """See [`Exchange.room`]; messages leave from any memory."""
        return [None] * len(shapes)

    def publish(self, channel: Channel, tensors: Sequence[torch.Tensor], most: int) -> None:
        """See [`Exchange.publish`]; here a tensor leaves when it is fetched."""

    def fetch(
        self,
        channel: Channel,
        which: Round,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = None,
    ) -> _Messages:
        """See [`Exchange.fetch`]."""
        sends = [(tensors[rows.index][:, rows.start : rows.stop], rows.peer) for rows in which.outgoing]
        return self._post(sends, which.incoming, which.tag, into)

    def move(
        self,
        channel: Channel,
        moves: HeadRound,
        sources: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        tag: int,
        behind: bool = False,
    ) -> _Messages:
        """See [`Exchange.move`]."""
        sends = [
            (block.of(sources[block.index]), block.peer) for block in moves.outgoing if block.peer != self.group.rank
        ]
        places, shapes, receives = [], tuple((tuple(t.shape), t.dtype) for t in sources), []
        for move in moves.incoming:
            block = move.source
            place = into[block.index][:, slice(*move.rows), slice(*move.heads)]
            if block.peer == self.group.rank:
                place.copy_(block.of(sources[block.index]))
                continue
            places.append(place)
            receives.append(Incoming(block.peer, shapes, block.index, *block.rows))
        return self._post(sends, receives, tag, places)

    def leave(self, posted: Pending) -> None:
        """See [`Exchange.leave`]; messages are waited for at once."""
        posted.wait()

    def _post(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[Incoming],
        tag: int,
        into: Sequence[torch.Tensor] | None,
    ) -> _Messages:
        """Sends tensors to peers, and receives parts from them."""
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
