"""How blocks move between the ranks of a group: published by their owner, fetched by who needs them.

[`PeerToPeer`] sends and receives (NCCL, gloo). Every rank posts its rounds in the same sequence, and a message belongs
to the same round at both of its ends. So no rank waits for a round that its peer has not reached.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import OutputBuffers
from ..ranks.group import ContextGroup

# Blocks of one channel are published one after another; those of different channels live side by side.
Channel = Literal["blocks", "gradients", "tokens to heads", "heads to tokens"]
MAX_TENSORS = 6  # whose heads are exchanged at once
Shape = tuple[tuple[int, ...], torch.dtype]
Published = tuple[Shape, ...]  # of all tensors that a rank publishes at once


def shapes_of(tensors: Sequence[Tensor]) -> Published:
    """The shape and dtype of each tensor."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


@dataclass(frozen=True)
class Region:
    """A part of one of several tensors of shape `(B, S, H, D)`.

    Args:
        index (`int`): Which of them.
        rows (`tuple[int, int]`): Its rows `[start, stop)`.
        heads (`tuple[int, int]`, *optional*): Its heads `[start, stop)`; all of them by default.
    """

    index: int
    rows: tuple[int, int]
    heads: tuple[int, int] | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """This part of these tensors."""
        rows = tensors[self.index][:, slice(*self.rows)]
        return rows if self.heads is None else rows[:, :, slice(*self.heads)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Its shape and dtype, for tensors of these shapes."""
        (batch, _, heads, *rest), dtype = shapes[self.index]
        start, stop = self.heads or (0, heads)
        return (batch, self.rows[1] - self.rows[0], stop - start, *rest), dtype


class Incoming(NamedTuple):
    """A part of what `peer`, a rank of the group, has published.

    Args:
        peer (`int`): The rank.
        shapes (`tuple`): Shape and dtype of every tensor that the peer has published.
        source (`Region`): The part of them.
        target (`Region`): Where it belongs among this rank's tensors.
    """

    peer: int
    shapes: Published
    source: Region
    target: Region


@dataclass(frozen=True, eq=False)
class Round:
    """One round of an exchange: who fetches what. Made once, for tensors of given shapes.

    Args:
        shapes (`tuple`): Shape and dtype of every tensor that this rank has published.
        outgoing (`tuple[tuple[int, Region], ...]`): The peers that fetch parts of them.
        incoming (`tuple[Incoming, ...]`): The parts that this rank fetches, from each peer in the order of its
            `outgoing`; of an exchange of heads its own part, too.
        tag (`int`): Tells the rounds apart.
    """

    shapes: Published
    outgoing: tuple[tuple[int, Region], ...]
    incoming: tuple[Incoming, ...]
    tag: int

    @cached_property
    def of_heads(self) -> bool:
        """Whether it exchanges heads, not whole rows."""
        return any(part.source.heads is not None for part in self.incoming)

    def targets(self, into: Sequence[Tensor] | None, device: torch.device) -> list[Tensor]:
        """Where each incoming part goes: its place in `into`, or a new tensor."""
        if into is not None:
            return [part.target.of(into) for part in self.incoming]
        shapes = [part.source.shape(part.shapes) for part in self.incoming]
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> list[Tensor]:
        """The tensors that were fetched; on a GPU the current stream waits for them, not the host."""


class Exchange:
    """The messages of one rank in one pass: published tensors leave from any memory when they are fetched, and need
    neither room nor buffers, unless a subclass says otherwise."""

    def reserve(self, channel: Channel, capacity: int) -> None:
        """Makes room for what will be published, before anything is under way that other ranks must join.

        Args:
            channel (`str`): Where it will be published.
            capacity (`int`): As in `publish`.
        """

    def output_buffers(self, channel: Channel, shapes: Sequence[Shape], capacity: int) -> OutputBuffers:
        """Buffers into which a kernel may write the tensors that are published next, so that they are not copied then.

        Args:
            channel (`str`): Where they will be published.
            shapes (sequence of `(shape, dtype)`): Of all of them; scalars of rows, `(B, S, H, 1)`, lie heads first.
            capacity (`int`): As in `publish`.

        Returns:
            A tensor each, or `None` where there is no such buffer.
        """
        return [None] * len(shapes)

    def use_current_stream(self) -> None:
        """Lets copies go on the stream of the kernels, where they hide behind nothing, and cost the host less."""

    def publish(self, channel: Channel, tensors: Sequence[Tensor], capacity: int) -> None:
        """Lets the peers fetch these tensors, which stay as they are until the next ones are published.

        Every rank of the group publishes equally often, possibly nothing.

        Args:
            channel (`str`): Where.
            tensors (sequence of `torch.Tensor`): The tensors.
            capacity (`int`): The most bytes that any rank publishes here; equal on all ranks.
        """

    def fetch(
        self,
        channel: Channel,
        this_round: Round,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        during_kernel: bool = False,
    ) -> Pending:
        """Starts to fetch what a round says.

        Args:
            channel (`str`): Where it was published.
            this_round ([`Round`]): Who fetches what.
            tensors (sequence of `torch.Tensor`): The tensors that this rank has published.
            into (sequence of `torch.Tensor`, *optional*): The tensors of which the targets are parts, of any strides;
                a new tensor for each part by default.
            during_kernel (`bool`, defaults to `False`): Whether a kernel computes while heads are exchanged.
        """
        raise NotImplementedError

    def wait_later(self, pending: Pending) -> None:
        """Leaves a round under way; the next pass over these ranks waits for it, and nobody touches it before. Messages
        are waited for at once."""
        pending.wait()


class Exchanges(NamedTuple):
    """The messages of one rank in one pass.

    Args:
        near ([`Exchange`]): With the ranks of this host, or with all ranks of the group.
        far ([`Exchange`]): With the ranks of the same number on other hosts, where a ring has two levels.
    """

    near: Exchange
    far: Exchange


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
class PeerToPeer(Exchange):
    """An [`Exchange`] by `isend` and `irecv`."""

    group: ContextGroup
    device: torch.device

    def fetch(
        self,
        channel: Channel,
        this_round: Round,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        during_kernel: bool = False,
    ) -> _Messages:
        """See [`Exchange.fetch`]; all messages are posted at once."""
        sent = [block.of(tensors).contiguous() for _, block in this_round.outgoing]
        targets, landing, operations = [], [], []
        process_group = self.group.process_group if sent or this_round.incoming else None
        for tensor, (peer, _) in zip(sent, this_round.outgoing, strict=True):
            operations.append(dist.P2POp(dist.isend, tensor, group=process_group, tag=this_round.tag, group_peer=peer))
        for part, target in zip(this_round.incoming, this_round.targets(into, self.device), strict=True):
            peer = part.peer
            if peer == self.group.rank:
                target.copy_(part.source.of(tensors))
                continue
            landed = target if target.is_contiguous() else target.new_empty(target.shape)
            operations.append(dist.P2POp(dist.irecv, landed, group=process_group, tag=this_round.tag, group_peer=peer))
            targets.append(target)
            landing.append(landed)
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Messages(works, sent, landing, targets, self._limit if works else ())

    @cached_property
    def _limit(self) -> tuple[timedelta, ...]:
        """That of the group, which gloo's messages would take from the time when the group was made."""
        return () if self.device.type == "cuda" else (self.group.time_limit(self.device),)


class ExchangeClock:
    """Adds up the time in which messages hold up a rank: sends, barriers, copies on the stream of the kernels, and
    waits. Messages during a kernel count for as long as something waits for them.

    Args:
        device (`torch.device`): Where the rank computes. GPUs are timed by events on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []

    def watch(self, exchange: Exchange) -> None:
        """Times the messages of one pass."""
        for name in ("publish", "fetch"):
            setattr(exchange, name, self._timed(getattr(exchange, name)))

    def seconds(self) -> float:
        """The time so far; the host waits until the device has come that far."""
        if self.device.type != "cuda":
            return float(sum(stop - start for start, stop in self.spans))
        torch.cuda.synchronize(self.device)
        return float(sum(start.elapsed_time(stop) for start, stop in self.spans)) / 1e3

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = self._now()
            result = call(*args, **options)
            self.spans.append((start, self._now()))
            if hasattr(result, "wait"):
                result.wait = self._timed(result.wait)
            return result

        return timed

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
