"""An [`Exchange`] inside of one host: every rank reads what its peers have published straight from their memory. Whole
rows are read by the copy engines, which leaves the multiprocessors to attention; heads are read by a kernel.

Published tensors lie in segments that take turns: two where tensors are copied into them, three where kernels write
there. A barrier on the stream of the copies says that every rank has published. Copies of the tensors published before
come ahead of it in the same stream, so the segment before is free behind it. Barriers end the process after the time
limit of the process group.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ..errors import RankMismatchError
from ..kernels import OutputBuffers
from ..ranks.group import ContextGroup
from ..ranks.host import host_id
from .exchange import Channel, Exchange, Pending, Round, Shape, shapes_of

if TYPE_CHECKING:
    from .fused import Table

logger = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)
_Kept = TypeVar("_Kept")

_ALIGNMENT = 256
_GRANULE = 2 << 20
_SPARE = 256 << 20  # bytes that stay free behind such memory
_TENSORS = 16  # at most that many are published at once
_REMEMBERED = 256
_IN_PLACE: tuple[Channel, ...] = ("gradients", "heads to tokens")  # kernels write these where they are published


class ChannelBuffer:
    """The buffer of one channel on all ranks: `count` segments of `size` bytes that take turns."""

    def __init__(self, group: ContextGroup, device: torch.device, size: int, count: int) -> None:
        self.size, self.count, self.published = size, count, 0
        self.buffer = _allocated(group, device, count * size)
        self.handle = symmetric_memory.rendezvous(self.buffer, group.process_group)
        self.met: deque[torch.cuda.Event] = deque(maxlen=count - 1)  # the barriers so far, the oldest first
        self.views: dict[Hashable, list[Tensor]] = {}
        self.tables: dict[Hashable, Table] = {}

    def tensors(self, peer: int, turn: int, shapes: Sequence[Shape]) -> list[Tensor]:
        """The tensors of these shapes that a peer publishes in a turn. Scalars, `(B, S, H, 1)`, lie heads first."""
        turn %= self.count

        def views() -> list[Tensor]:
            found = []
            for (shape, dtype), offset in zip(shapes, _offsets(shapes), strict=True):
                with torch.inference_mode(False):
                    whole = self.handle.get_buffer(peer, (self.count * self.size // dtype.itemsize,), dtype)
                found.append(whole.as_strided(shape, _strides(shape), (turn * self.size + offset) // dtype.itemsize))
            return found

        return remembered(self.views, (peer, turn, *shapes), views)

    def incoming(self, this_round: Round, turn: int) -> list[Tensor]:
        """The parts that are fetched in a round, of the tensors published in a turn."""

        def views() -> list[Tensor]:
            return [part.source.of(self.tensors(part.peer, turn, part.shapes)) for part in this_round.incoming]

        return remembered(self.views, (this_round, turn % self.count), views)


class SymmetricPool:
    """The symmetric memory of a group, and the stream on which copies go. One for all passes.

    Args:
        group ([`ContextGroup`]): The ranks, all of one host.
        device (`torch.device`): This rank's device.
        milliseconds (`int`): How long a barrier waits for the other ranks.
    """

    def __init__(self, group: ContextGroup, device: torch.device, milliseconds: int) -> None:
        self.group, self.device, self.milliseconds = group, device, milliseconds
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.last = self.stream  # of the latest copies; those on another one have to wait for it
        self.channels: dict[Channel, ChannelBuffer] = {}
        self.pending: list[tuple[Pending, torch.cuda.Stream]] = []  # rounds for which no stream has waited

    def buffer(self, channel: Channel, capacity: int) -> ChannelBuffer:
        """The buffer of a channel, made larger on all ranks at once if it has to be."""
        nbytes = capacity + _TENSORS * _ALIGNMENT  # the same on ranks that publish more and fewer tensors
        buffer = self.channels.get(channel)
        if buffer is None or buffer.size < nbytes:
            torch.cuda.synchronize(self.device)  # nobody reads the old one when all ranks have met
            size = -(-nbytes // _GRANULE) * _GRANULE
            buffer = ChannelBuffer(self.group, self.device, size, 3 if channel in _IN_PLACE else 2)
            self.channels[channel] = buffer
        return buffer

    def settle(self) -> None:
        """Lets the current stream wait for the rounds that were left under way, and so the streams that left them."""
        current = torch.cuda.current_stream(self.device) if self.pending else None
        for pending, stream in self.pending:
            pending.wait()
            if stream != current:
                with torch.cuda.stream(stream):
                    pending.wait()
        self.pending = []


@dataclass
class _Copies:
    """Copies under way on the stream of the pool, or, without an event, on the current one."""

    into: Sequence[Tensor]
    done: torch.cuda.Event | None
    device: torch.device
    table: "Table | None" = None  # which the kernel reads

    def wait(self) -> list[Tensor]:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return list(self.into)


@dataclass
class Symmetric(Exchange):
    """An [`Exchange`] by copies from the memory of peers.

    Args:
        pool ([`SymmetricPool`]): The memory.
        own_stream (`bool`, defaults to `True`): Whether copies go on a stream of their own; on the current one they
            hide behind nothing, and cost the host less.
    """

    pool: SymmetricPool
    own_stream: bool = True

    def use_current_stream(self) -> None:
        """See [`Exchange.use_current_stream`]; behind the copies of passes before."""
        self.own_stream = False
        current = torch.cuda.current_stream(self.pool.device)
        if current != self.pool.last:
            current.wait_stream(self.pool.last)
            self.pool.last = current

    def reserve(self, channel: Channel, capacity: int) -> None:
        """See [`Exchange.reserve`]; all ranks meet where the memory grows."""
        self.pool.buffer(channel, capacity)

    def output_buffers(self, channel: Channel, shapes: Sequence[Shape], capacity: int) -> OutputBuffers:
        buffer = self.pool.buffer(channel, capacity)
        if buffer.count < 3:
            return [None] * len(shapes)
        if len(buffer.met) == buffer.met.maxlen:  # before that nothing was ever there
            torch.cuda.current_stream(self.pool.device).wait_event(buffer.met[0])
        return buffer.tensors(self.pool.group.rank, buffer.published, shapes)

    def publish(self, channel: Channel, tensors: Sequence[Tensor], capacity: int) -> None:
        buffer = self.pool.buffer(channel, capacity)
        shapes = shapes_of(tensors)
        published = buffer.tensors(self.pool.group.rank, buffer.published, shapes)
        with self._stream():
            for tensor, target in zip(tensors, published, strict=True):
                if target.data_ptr() == tensor.data_ptr():
                    continue
                target.copy_(tensor, non_blocking=True)
                if self.own_stream:
                    tensor.record_stream(self.pool.stream)
            buffer.handle.barrier(channel=0, timeout_ms=self.pool.milliseconds)
            if buffer.count > 2:
                buffer.met.append(self._event())
        buffer.published += 1

    def fetch(
        self,
        channel: Channel,
        this_round: Round,
        tensors: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        during_kernel: bool = False,
    ) -> _Copies:
        """See [`Exchange.fetch`]. Rows are copied one part after another, heads by one kernel that reads from all
        peers. A fetch of a peer costs this rank nothing."""
        buffer, table = self.pool.channels[channel], None
        turn = buffer.published - 1
        if this_round.of_heads:
            assert into is not None, "exchanged heads have their places"
            table, targets = self._table(buffer, turn, this_round, into), into
        else:
            sources, targets = buffer.incoming(this_round, turn), this_round.targets(into, self.pool.device)
        with self._stream():  # which waits for the current one, where the memory may have been in use
            if table is not None:
                table.run(targets, during_kernel)
            else:
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
            done = self._event() if self.own_stream else None
        return _Copies(targets, done, self.pool.device, table)

    def wait_later(self, pending: Pending) -> None:
        self.pool.pending.append((pending, torch.cuda.current_stream(self.pool.device)))

    def _stream(self) -> AbstractContextManager[None]:
        """The stream of the copies; it waits for all that the current stream has been given so far."""
        if not self.own_stream:
            return nullcontext()
        pool = self.pool
        pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
        if pool.last is not pool.stream:
            pool.stream.wait_stream(pool.last)
            pool.last = pool.stream
        return torch.cuda.stream(pool.stream)

    def _event(self) -> torch.cuda.Event:
        """Marks how far the current stream is."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.pool.device))
        return event

    def _table(self, buffer: ChannelBuffer, turn: int, this_round: Round, into: Sequence[Tensor]) -> "Table":
        """The copies of a round of heads, made once for destinations that are laid out alike."""
        from .fused import Table

        current = not self.own_stream and self.pool.device.type == "cuda"
        stream = torch.cuda.current_stream(self.pool.device) if current else None  # on which a new table arrives
        layouts = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in into)

        def table() -> Table:
            parts = zip(buffer.incoming(this_round, turn), this_round.incoming, strict=True)
            return Table([(source, part.target.of(into), part.target.index) for source, part in parts], into)

        return remembered(buffer.tables, (this_round, turn % buffer.count, stream, *layouts), table)


def _allocated(group: ContextGroup, device: torch.device, nbytes: int) -> Tensor:
    """Memory that peers can read, on all ranks or on none: a rank that has its own would wait for the others."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes + _SPARE:
        torch.cuda.empty_cache()  # such memory is not taken from what torch has kept
    with group.agreeing(device, "making memory that peers read") as found, torch.inference_mode(False):
        found.add("shared bytes", nbytes)
        try:
            return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)  # later passes may train
        except RuntimeError as problem:
            kind = torch.OutOfMemoryError if "out of memory" in str(problem) else RuntimeError
            reason = str(problem).splitlines()[0]
            raise kind(f"{nbytes / 2**30:.2f} GiB of memory that peers read could not be had: {reason}") from problem


def remembered(memory: dict[_Key, _Kept], key: _Key, make: Callable[[], _Kept]) -> _Kept:
    """Makes a value once, and forgets the oldest if there are many; lengths that come and go do not fill the memory."""
    if key not in memory:
        made = make()
        if len(memory) >= _REMEMBERED:
            del memory[next(iter(memory))]
        memory[key] = made
    return memory[key]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor; of scalars of rows, `(B, S, H, 1)`, those of `(B, H, S)`."""
    if shape[3:] == (1,):
        return torch.empty(shape[0], shape[2], shape[1], 1, device="meta").transpose(1, 2).stride()
    return torch.empty(shape, device="meta").stride()


def _offsets(shapes: Sequence[Shape]) -> list[int]:
    """Where in a segment each tensor begins, in bytes."""
    sizes = (-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in shapes)
    return list(accumulate(sizes, initial=0))[:-1]


def open_pool(group: ContextGroup, device: torch.device) -> SymmetricPool | str:
    """The symmetric memory of a group on this rank's device, or why its ranks cannot read each other's memory; on all
    of them alike. Every rank calls it at the same time. What it returns belongs to the group, see
    `hf_burst.ring.resources`.
    """
    doing = "a trial of memory that peers read"
    fits = device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
    refusal = None if fits else f"symmetric memory needs a GPU of NVIDIA and Triton, not {device.type} alone"
    reports = group.gather((host_id(), device.index, refusal), device, doing)
    problems = _by_rank(problem for _, _, problem in reports)
    if len({host for host, _, _ in reports}) > 1:
        problems.append("the ranks are on several hosts")
    shares = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # one GPU by several ranks, as in tests
    if len({index for _, index, _ in reports}) < group.size and not problems and not shares:
        problems.append("every rank sees one GPU as its first; let all see all GPUs of the host")
    if problems:
        return "; ".join(problems)
    limit = group.time_limit(device)  # after which the process group gives up, too
    pool = SymmetricPool(group, device, int(1000 * limit.total_seconds()))
    problems = _by_rank(group.gather(_trial(pool, [index for _, index, _ in reports]), device, doing))
    if problems:
        logger.warning("hf_burst sends and receives, since symmetric memory cannot be had: %s", "; ".join(problems))
    return "; ".join(problems) or pool


def _by_rank(problems: Iterable[str | None]) -> list[str]:
    return [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]


def _trial(pool: SymmetricPool, indices: Sequence[int]) -> str | None:
    """Why the ranks cannot read each other's memory, found by trying."""
    own = pool.device.index
    unreachable = [index for index in indices if index != own and not torch.cuda.can_device_access_peer(own, index)]
    try:
        pool.buffer("blocks", 1)
    except (RuntimeError, RankMismatchError) as problem:  # containers may forbid it
        return str(problem).splitlines()[0]
    return f"cannot read the memory of devices {unreachable}" if unreachable else None
