"""How blocks move between the ranks of a group: published by their home, fetched by who needs them, and counted.

[`PeerToPeer`] sends and receives (NCCL, gloo). Every rank posts its rounds in the same sequence, and a message belongs
to the same round at both of its ends. So no rank waits for a round that its peer has not reached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan import Traffic
from ..ranks.group import ContextGroup

# Blocks of one channel are published one after another; those of different channels live side by side.
Channel = Literal["blocks", "gradients", "tokens to heads", "heads to tokens"]
MOST_TENSORS = 6  # that are exchanged for heads at once
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
    """One round of an exchange: who fetches which rows. Made once, for tensors of given shapes.

    Args:
        shapes (`tuple`): Shape and dtype of every tensor that this rank has published.
        outgoing (`tuple[Outgoing, ...]`): The rows of them that others fetch.
        incoming (`tuple[Incoming, ...]`): The rows that this rank fetches, from each peer in the order of its
            `outgoing`.
        tag (`int`): Tells the rounds apart.
    """

    shapes: tuple[Shape, ...]
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    tag: int

    @cached_property
    def sent(self) -> Traffic:
        """Messages and bytes that leave this rank."""
        total = 0
        for rows in self.outgoing:
            (batch, _, *rest), dtype = self.shapes[rows.index]
            total += batch * (rows.stop - rows.start) * math.prod(rest) * dtype.itemsize
        return Traffic(len(self.outgoing), total)

    def landing(self, device: torch.device) -> list[Tensor]:
        """New tensors for the rows that come."""
        return [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (rows.shape for rows in self.incoming)
        ]


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

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor."""
        return tensor[:, slice(*self.rows), slice(*self.heads)]


# A block of what a peer has published, and the one of the destination of the same index to which it goes.
HeadMove = tuple[HeadBlock, HeadBlock]


@dataclass(frozen=True, eq=False)
class HeadRound:
    """One round in which heads are exchanged.

    Args:
        outgoing (`tuple[HeadBlock, ...]`): The parts of this rank's tensors that peers fetch, in their order.
        incoming (`tuple[HeadMove, ...]`): The parts that this rank fetches, its own included.
        rows (`dict[int, tuple[int, ...]]`): For each peer, the rows of each tensor that it has published.
    """

    outgoing: tuple[HeadBlock, ...]
    incoming: tuple[HeadMove, ...]
    rows: dict[int, tuple[int, ...]]

    def shapes(self, peer: int, tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
        """Shapes and dtypes of the tensors that a peer has published, by those of this rank."""
        return tuple(
            ((tensor.shape[0], rows, *tensor.shape[2:]), tensor.dtype)
            for tensor, rows in zip(tensors, self.rows[peer], strict=True)
        )


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> list[Tensor]:
        """The tensors that were fetched; on a GPU the current stream waits for them, not the host."""


class Exchange(Protocol):
    """The messages of one rank in one pass.

    Args:
        sent ([`Traffic`]): Messages and bytes that have left this rank so far.
    """

    sent: Traffic

    def reserve(self, channel: Channel, capacity: int) -> None:
        """Makes room for what will be published, before anything is under way that other ranks must take part in.

        Args:
            channel (`str`): Where it will be published.
            capacity (`int`): As in `publish`.
        """

    def output_buffers(self, channel: Channel, shapes: Sequence[Shape], capacity: int) -> Sequence[Tensor | None]:
        """Buffers into which a kernel may write the tensors that are published next, so that they are not copied then.

        Args:
            channel (`str`): Where they will be published.
            shapes (sequence of `(shape, dtype)`): Of all of them; scalars of rows, `(B, S, H, 1)`, lie heads first.
            capacity (`int`): As in `publish`.

        Returns:
            A tensor each, or `None` where there is no such buffer.
        """

    def publish(self, channel: Channel, tensors: Sequence[Tensor], capacity: int) -> None:
        """Lets the peers fetch these tensors, which stay as they are until the next ones are published.

        Every rank of the group publishes equally often, possibly nothing.

        Args:
            channel (`str`): Where.
            tensors (sequence of `torch.Tensor`): The tensors.
            capacity (`int`): The most bytes that any rank publishes here; equal on all ranks.
        """

    def fetch(
        self, channel: Channel, this_round: Round, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None
    ) -> Pending:
        """Starts to fetch rows.

        Args:
            channel (`str`): Where they were published.
            this_round ([`Round`]): Who fetches which rows.
            tensors (sequence of `torch.Tensor`): The tensors that this rank has published.
            into (sequence of `torch.Tensor`, *optional*): Where the rows go; new tensors by default.
        """

    def fetch_heads(
        self,
        channel: Channel,
        this_round: HeadRound,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor],
        tag: int,
        beside_kernel: bool = False,
    ) -> Pending:
        """Starts a round in which heads are exchanged.

        Args:
            channel (`str`): Where `tensors` were published.
            this_round ([`HeadRound`]): Who fetches which heads of which rows.
            tensors (sequence of `torch.Tensor` of shape `(B, S, H, D)`): The tensors that this rank has published.
            into (sequence of `torch.Tensor` of shape `(B, S', H', D)`): The destinations, of any strides.
            tag (`int`): Tells the rounds apart.
            beside_kernel (`bool`, defaults to `False`): Whether a kernel computes meanwhile.
        """

    def wait_later(self, pending: Pending) -> None:
        """Leaves a round under way; the next pass over these ranks waits for it, and nobody touches it before."""


class Exchanges(NamedTuple):
    """The messages of one rank in one pass.

    Args:
        near ([`Exchange`]): With the ranks of this host, or with all ranks of the group.
        far ([`Exchange`]): With the ranks of the same number on other hosts, where a ring has two levels.
    """

    near: Exchange
    far: Exchange

    @property
    def sent(self) -> Traffic:
        """Messages and bytes that have left this rank so far."""
        far = self.far.sent
        return self.near.sent if self.far is self.near else self.near.sent + replace(far, across=far.bytes)


@dataclass
class _Messages:
    """Sends and receives under way. Sent tensors are kept alive, and must not change, until `wait`."""

    works: list[dist.Work]
    sent: list[Tensor]
    landing: list[Tensor]
    into: list[Tensor]
    limit: tuple[timedelta, ...] = ()  # how long the host waits; NCCL's streams wait instead

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait(*self.limit)
        for destination, landed in zip(self.into, self.landing, strict=True):
            if destination is not landed:
                destination.copy_(landed)
        self.works, self.sent, self.landing = [], [], self.into
        return self.into


@dataclass
class PeerToPeer:
    """An [`Exchange`] by `isend` and `irecv`."""

    group: ContextGroup
    device: torch.device
    sent: Traffic = field(default_factory=Traffic)

    def reserve(self, channel: Channel, capacity: int) -> None:
        """See [`Exchange.reserve`]; messages need none."""

    def output_buffers(self, channel: Channel, shapes: Sequence[Shape], capacity: int) -> Sequence[None]:
        """See [`Exchange.output_buffers`]; messages leave from any memory."""
        return [None] * len(shapes)

    def publish(self, channel: Channel, tensors: Sequence[Tensor], capacity: int) -> None:
        """See [`Exchange.publish`]; here a tensor leaves when it is fetched."""

    def fetch(
        self, channel: Channel, this_round: Round, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None
    ) -> _Messages:
        """See [`Exchange.fetch`]."""
        sends = [(tensors[rows.index][:, rows.start : rows.stop], rows.peer) for rows in this_round.outgoing]
        receives = [rows.peer for rows in this_round.incoming]
        return self._post(sends, receives, this_round.landing(self.device) if into is None else into, this_round.tag)

    def fetch_heads(
        self,
        channel: Channel,
        this_round: HeadRound,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor],
        tag: int,
        beside_kernel: bool = False,
    ) -> _Messages:
        """See [`Exchange.fetch_heads`]."""
        own = self.group.rank
        sends = [(block.of(tensors[block.index]), block.peer) for block in this_round.outgoing if block.peer != own]
        into_parts, receives = [], []
        for block, place in this_round.incoming:
            destination = place.of(into[block.index])
            if block.peer == own:
                destination.copy_(block.of(tensors[block.index]))
                continue
            into_parts.append(destination)
            receives.append(block.peer)
        return self._post(sends, receives, into_parts, tag)

    def wait_later(self, pending: Pending) -> None:
        """See [`Exchange.wait_later`]; messages are waited for at once."""
        pending.wait()

    def _post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[int], into: Sequence[Tensor], tag: int
    ) -> _Messages:
        """Sends tensors to peers, and receives from them, all in one round."""
        tensors = [tensor.contiguous() for tensor, _ in sends]
        landing = [target if target.is_contiguous() else target.new_empty(target.shape) for target in into]
        process_group = self.group.process_group if sends or receives else None
        operations = [
            dist.P2POp(dist.isend, tensor, group=process_group, tag=tag, group_peer=peer)
            for tensor, (_, peer) in zip(tensors, sends, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=process_group, tag=tag, group_peer=peer)
            for tensor, peer in zip(landing, receives, strict=True)
        ]
        self.sent += Traffic(len(tensors), sum(tensor.nbytes for tensor in tensors))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Messages(works, tensors, landing, list(into), self._limit if works else ())

    @cached_property
    def _limit(self) -> tuple[timedelta, ...]:
        """That of the group, which gloo's messages would take from the time when the group was made."""
        return () if self.device.type == "cuda" else (self.group.time_limit(self.device),)
